// Tensors as memory: whether a kernel may use it directly, the order of the elements, and version counters.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>

namespace amp_plugin {

// Return true if the tensor is plain strided memory: no subclass or wrapper, and no pending conjugation or
// negation.
inline bool is_plain(const at::Tensor& tensor) {
  using c10::DispatchKey;
  constexpr c10::DispatchKeySet special(
      {DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::Conjugate, DispatchKey::Negative,
       DispatchKey::ZeroTensor, DispatchKey::Functionalize, DispatchKey::FuncTorchGradWrapper,
       DispatchKey::FuncTorchBatched});
  return tensor.layout() == at::kStrided && !tensor.is_nested() && !tensor.key_set().has_any(special);
}

// Return true if one loop over memory visits the same elements of both tensors.
inline bool same_memory_order(const at::Tensor& tensor, const at::Tensor& other) {
  if (tensor.is_contiguous() && other.is_contiguous()) return true;
  return tensor.strides() == other.strides() && tensor.is_non_overlapping_and_dense();
}

// Returns the tensor itself if it has the memory order of the other one, else a copy in that order.
inline at::Tensor ordered_as(const at::Tensor& tensor, const at::Tensor& other) {
  if (same_memory_order(tensor, other)) return tensor;
  return at::empty_like(other, tensor.scalar_type()).copy_(tensor);
}

// Increases the version counters, which tell autograd and callers that the tensors were written.
//
// Each increase is an atomic operation and would wait for its memory alone. So the counters of a block are
// read first, and these reads overlap.
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
