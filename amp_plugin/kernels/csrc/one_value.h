// A device-side number, read on the host: factors, scales, flags.
#pragma once

#include <ATen/core/Tensor.h>

namespace amp_plugin {

// The one element of a float32 or float64 tensor on the CPU; `name` is what the op calls it.
inline double one_value(const at::Tensor& number, const char* name) {
  TORCH_CHECK(
      number.numel() == 1 && number.device().is_cpu(), "amp_plugin: ", name,
      " must have one element on the gradients' device; got ", number.sizes(), " on ", number.device(), ".");
  if (number.scalar_type() == at::kFloat) return *number.const_data_ptr<float>();
  TORCH_CHECK(
      number.scalar_type() == at::kDouble, "amp_plugin: ", name, " must be float32 or float64; got ",
      number.scalar_type(), ".");
  return *number.const_data_ptr<double>();
}

}  // namespace amp_plugin
