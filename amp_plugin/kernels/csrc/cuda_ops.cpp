// norm_check, unscale_ and multiply_ on CUDA tensors. Each is one launch, never waits for the device, and
// runs no Python code.

#include "cuda_gradients.h"
#include "served_ops.h"
#include "tensor_memory.h"

namespace amp_plugin::cuda {
namespace {

GradientTable table_of(c10::Device device, const Dense& gradients) {
  return GradientTable(*Device::find(device.index()), gradients.tensors());
}

Measured norm_check(
    c10::Device device, at::TensorList grads, const at::Tensor& inv_scale, double p, bool is_scale) {
  const Dense dense(grads);
  return table_of(device, dense).measure(false, inv_scale, p, is_scale);
}

Measured unscale_(
    c10::Device device, at::TensorList grads, const at::Tensor& inv_scale, double p, bool is_scale) {
  const Dense dense(grads);
  const Measured result = table_of(device, dense).measure(true, inv_scale, p, is_scale);
  dense.finish();
  return result;
}

at::Tensor multiply_(
    c10::Device device, at::TensorList grads, const at::Tensor& factor, std::optional<double> max_norm,
    const OptionalTensor& skipped) {
  const Dense dense(grads);
  at::Tensor found_inf = table_of(device, dense).multiply_(factor, max_norm, skipped);
  dense.finish();
  return found_inf;
}

}  // namespace

TORCH_LIBRARY_IMPL(amp_plugin, CUDA, library) {
  add_op(library, "norm_check", norm_check);
  add_op(library, "unscale_", unscale_);
  add_op(library, "multiply_", multiply_);
}

}  // namespace amp_plugin::cuda
