// One-element CPU tensors that hold a number: a factor, a scale, a norm or a flag.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

namespace amp_plugin {

// Returns the value of a float32 or float64 tensor on the CPU that has one element. `name` is the argument's
// name in the op, for errors.
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

inline at::Tensor tensor_of(double value) {
  at::Tensor result = at::empty({}, at::kFloat);
  *result.mutable_data_ptr<float>() = static_cast<float>(value);
  return result;
}

}  // namespace amp_plugin
