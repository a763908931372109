// Numbers on the device, which kernels read and the host does not.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "cuda_layout.h"

namespace amp_plugin::cuda {

inline void require_one_element(
    const at::Tensor& tensor, const char* name, c10::Device device, at::ScalarType type,
    bool or_double = false) {
  const bool is_right = tensor.scalar_type() == type || (or_double && tensor.scalar_type() == at::kDouble);
  if (tensor.device() == device && tensor.numel() == 1 && is_right) return;
  TORCH_CHECK_VALUE(
      false, name, ": got a tensor of ", tensor.numel(), " elements, ", tensor.scalar_type(), ", on ",
      tensor.device(), "; give one element of ", type, or_double ? " or Double" : "", " on ", device);
}

inline DeviceScalar scalar(
    const at::Tensor& tensor, const char* name, c10::Device device, bool is_inverted = false) {
  require_one_element(tensor, name, device, at::kFloat, true);
  return {tensor.const_data_ptr(), tensor.scalar_type() == at::kDouble, is_inverted};
}

// No address where there is none.
inline DeviceScalar optional_scalar(
    const std::optional<at::Tensor>& tensor, const char* name, c10::Device device) {
  return tensor ? scalar(*tensor, name, device) : DeviceScalar{nullptr, 0, 0};
}

}  // namespace amp_plugin::cuda
