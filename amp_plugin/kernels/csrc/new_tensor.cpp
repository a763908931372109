#include "new_tensor.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

namespace amp_plugin {

at::Tensor new_tensor(at::IntArrayRef sizes, at::ScalarType type, c10::Device device) {
  return at::empty(sizes, at::TensorOptions(type).device(device));
}

at::Tensor new_tensor_like(const at::Tensor& like, at::ScalarType type) {
  return at::empty_like(like, like.options().dtype(type));
}

}  // namespace amp_plugin
