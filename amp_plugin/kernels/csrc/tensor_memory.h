// Tensors as memory: which may be taken as they are, in what order elements lie, and that they were written.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>

namespace amp_plugin {

// Whether it is strided memory, with no wrapper and no lazy bit around it.
inline bool is_plain(const at::Tensor& tensor) {
  using c10::DispatchKey;
  constexpr c10::DispatchKeySet special(
      {DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::Conjugate, DispatchKey::Negative,
       DispatchKey::ZeroTensor, DispatchKey::Functionalize, DispatchKey::FuncTorchGradWrapper,
       DispatchKey::FuncTorchBatched});
  return tensor.layout() == at::kStrided && !tensor.is_nested() && !tensor.key_set().has_any(special);
}

// Whether one loop over memory visits the same elements of two tensors.
inline bool same_memory_order(const at::Tensor& tensor, const at::Tensor& other) {
  if (tensor.is_contiguous() && other.is_contiguous()) return true;
  return tensor.strides() == other.strides() && tensor.is_non_overlapping_and_dense();
}

// A tensor in the memory order of another: itself, or a copy.
inline at::Tensor ordered_as(const at::Tensor& tensor, const at::Tensor& other) {
  if (same_memory_order(tensor, other)) return tensor;
  return at::empty_like(other, tensor.scalar_type()).copy_(tensor);
}

// Version counters, by which autograd and callers know that a tensor was written.
//
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
