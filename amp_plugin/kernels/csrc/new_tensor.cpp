#include "new_tensor.h"

#include <ATen/ops/empty_like_ops.h>
#include <ATen/ops/empty_ops.h>

namespace amp_plugin {

at::Tensor new_tensor(at::IntArrayRef sizes, at::ScalarType type, c10::Device device) {
  return at::_ops::empty_memory_format::call(
      c10::fromIntArrayRefSlow(sizes), type, std::nullopt, device, std::nullopt, std::nullopt);
}

at::Tensor new_tensor_like(const at::Tensor& like, at::ScalarType type) {
  return at::_ops::empty_like::call(like, type, std::nullopt, std::nullopt, std::nullopt, std::nullopt);
}

}  // namespace amp_plugin
