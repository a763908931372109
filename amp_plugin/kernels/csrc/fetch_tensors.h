// Asks early for what a loop over many tensors reads: each lies elsewhere, and 10 000 of them in no cache.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace amp_plugin {

constexpr size_t kLinesOfTensor = (sizeof(c10::TensorImpl) + 63) / 64;

inline void fetch_tensor(const at::Tensor& tensor) {
  const auto* begin = reinterpret_cast<const char*>(tensor.unsafeGetTensorImpl());
  for (size_t line = 0; line < kLinesOfTensor; ++line) __builtin_prefetch(begin + 64 * line);
}

// Tensor i + 12 itself, and the storage of tensor i + 4, which is here by then.
inline void fetch_ahead_of(at::TensorList tensors, size_t i) {
  if (i + 12 < tensors.size()) fetch_tensor(tensors[i + 12]);
  if (i + 4 < tensors.size() && tensors[i + 4].has_storage())
    __builtin_prefetch(tensors[i + 4].unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
}

}  // namespace amp_plugin
