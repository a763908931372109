// Whether one loop over memory visits the same elements of two tensors.
#pragma once

#include <ATen/core/Tensor.h>

namespace amp_plugin {

inline bool same_memory_order(const at::Tensor& tensor, const at::Tensor& other) {
  if (tensor.is_contiguous() && other.is_contiguous()) return true;
  return tensor.strides() == other.strides() && tensor.is_non_overlapping_and_dense();
}

}  // namespace amp_plugin
