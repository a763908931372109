// Tensors to be filled: `at::empty` without its header, which brings the dispatcher's along.
#pragma once

#include <ATen/core/Tensor.h>

namespace amp_plugin {

at::Tensor new_tensor(at::IntArrayRef sizes, at::ScalarType type, c10::Device device = c10::kCPU);

// One of another dtype, in the memory order of `like`.
at::Tensor new_tensor_like(const at::Tensor& like, at::ScalarType type);

}  // namespace amp_plugin
