// norm_check, unscale_ and multiply_ on CUDA tensors. Each is one launch, never waits for the device, and
// runs no Python code.

#include "cuda_gradients.h"
#include "served_ops.h"
#include "tensor_memory.h"

namespace amp_plugin::cuda {
namespace {

template <bool writes>
Measured measure(
    c10::Device device, at::TensorList grads, const at::Tensor& inv_scale, double p, bool is_scale) {
  const Dense dense(grads);
  Measured result = GradientTable::of(dense.tensors(), device).measure(writes, inv_scale, p, is_scale);
  if (writes) dense.finish();
  return result;
}

at::Tensor multiply_(
    c10::Device device, at::TensorList grads, const at::Tensor& factor, std::optional<double> max_norm,
    const OptionalTensor& skipped) {
  const Dense dense(grads);
  at::Tensor found_inf = GradientTable::of(dense.tensors(), device).multiply_(factor, max_norm, skipped);
  dense.finish();
  return found_inf;
}

}  // namespace

TORCH_LIBRARY_IMPL(amp_plugin, CUDA, library) {
  add_op(library, "norm_check", measure<false>);
  add_op(library, "unscale_", measure<true>);
  add_op(library, "multiply_", multiply_);
}

}  // namespace amp_plugin::cuda
