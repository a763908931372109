// Tensors as memory: whether a kernel may use it directly, the order of the elements, and version counters.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <vector>

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

// Tensors without gaps in memory. A tensor with gaps is replaced by a dense copy. If tensors `like` are
// given, those in another memory order are replaced too.
class Dense {
 public:
  explicit Dense(at::TensorList tensors, at::TensorList like = {}) : tensors_(tensors) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      const at::Tensor& tensor = tensors[i];
      if (like.empty() ? tensor.is_non_overlapping_and_dense() : same_memory_order(tensor, like[i])) continue;
      if (copies_.empty()) copies_ = tensors.vec();
      copies_[i] =
          like.empty() ? tensor.contiguous() : at::empty_like(like[i], tensor.scalar_type()).copy_(tensor);
    }
  }

  at::TensorList tensors() const { return copies_.empty() ? tensors_ : at::TensorList(copies_); }

  // Call after writing. Copies are written back, and version counters are increased.
  void finish() const {
    for (size_t i = 0; i < copies_.size(); ++i) {
      if (!copies_[i].is_same(tensors_[i])) tensors_[i].copy_(copies_[i]);
    }
    increment_versions(tensors_);
  }

 private:
  at::TensorList tensors_;
  std::vector<at::Tensor> copies_;
};

}  // namespace amp_plugin
