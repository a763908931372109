// One-element tensors that hold a number: a factor, a scale, a norm or a flag.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cmath>
#include <optional>

#include "cuda_layout.h"

namespace amp_plugin {

inline void require_one_element(
    const at::Tensor& tensor, const char* name, c10::Device device, at::ScalarType type,
    bool or_double = false) {
  const bool is_right = tensor.scalar_type() == type || (or_double && tensor.scalar_type() == at::kDouble);
  TORCH_CHECK_VALUE(
      tensor.device() == device && tensor.numel() == 1 && is_right, name, ": got a tensor of ",
      tensor.numel(), " elements, ", tensor.scalar_type(), ", on ", tensor.device(), "; give one element of ",
      type, or_double ? " or Double" : "", " on ", device);
}

// Checks a float32 or float64 tensor with one element. The number itself is not read: on a GPU, only kernels
// read it.
inline cuda::DeviceScalar scalar(
    const at::Tensor& tensor, const char* name, c10::Device device, bool is_inverted = false) {
  require_one_element(tensor, name, device, at::kFloat, true);
  return {tensor.const_data_ptr(), tensor.scalar_type() == at::kDouble, is_inverted};
}

// A missing tensor gives a DeviceScalar with a null address.
inline cuda::DeviceScalar optional_scalar(
    const std::optional<at::Tensor>& tensor, const char* name, c10::Device device) {
  return tensor ? scalar(*tensor, name, device) : cuda::DeviceScalar{nullptr, 0, 0};
}

// The number of a tensor on the CPU.
inline double one_value(const at::Tensor& tensor, const char* name, bool is_inverted = false) {
  return cuda::read(scalar(tensor, name, at::kCPU, is_inverted));
}

inline at::Tensor new_number(c10::Device device) {
  return at::empty({}, at::device(device).dtype(at::kFloat));
}

}  // namespace amp_plugin
