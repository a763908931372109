// Version counters, by which autograd and callers know that a tensor was written.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>

namespace amp_plugin {

// A count is an atomic operation, and those wait for memory one by one; reads before them do not.
inline void increment_versions(at::TensorList tensors) {
  constexpr size_t kBlock = 16;
  for (size_t begin = 0; begin < tensors.size(); begin += kBlock) {
    const at::TensorList block = tensors.slice(begin, std::min(kBlock, tensors.size() - begin));
    for (const at::Tensor& tensor : block) {
      c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
      if (!impl.is_inference()) static_cast<void>(impl.version_counter().current_version());
    }
    for (const at::Tensor& tensor : block) {
      if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
    }
  }
}

}  // namespace amp_plugin
