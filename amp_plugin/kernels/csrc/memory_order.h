// Whether one loop over memory visits the same elements of two tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>

namespace amp_plugin {

inline bool same_memory_order(const at::Tensor& tensor, const at::Tensor& other) {
  if (tensor.is_contiguous() && other.is_contiguous()) return true;
  return tensor.strides() == other.strides() && tensor.is_non_overlapping_and_dense();
}

// A tensor in the memory order of another: itself, or a copy.
inline at::Tensor ordered_as(const at::Tensor& tensor, const at::Tensor& other) {
  if (same_memory_order(tensor, other)) return tensor;
  return at::empty_like(other, tensor.scalar_type()).copy_(tensor);
}

}  // namespace amp_plugin
