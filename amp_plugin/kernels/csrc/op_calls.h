// Calls of our ops through the dispatcher, as plain functions: its headers are half of what a source without
// them takes to compile.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

namespace amp_plugin::op_calls {

using Measured = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using OptionalTensor = std::optional<at::Tensor>;
using Tensors = at::TensorList;

Measured norm_check(Tensors grads, const at::Tensor& inv_scale, double p, bool is_scale);
Measured unscale_(Tensors grads, const at::Tensor& inv_scale, double p, bool is_scale);
at::Tensor multiply_(Tensors grads, const at::Tensor& factor);

void adam_(
    Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors max_exp_avg_sqs,
    Tensors steps, Tensors remainders, double lr, double beta1, double beta2, double eps, double weight_decay,
    bool decoupled_weight_decay, bool maximize, const OptionalTensor& lr_tensor,
    const OptionalTensor& grad_scale, const OptionalTensor& found_inf);
void sgd_(
    Tensors params, Tensors grads, Tensors momentum_buffers, Tensors remainders, double lr, double momentum,
    double dampening, double weight_decay, bool nesterov, bool maximize, bool first_step,
    const OptionalTensor& lr_tensor, const OptionalTensor& grad_scale, const OptionalTensor& found_inf);

// Whether a call may also go past the dispatcher: no mode, tracer or transform takes ops, no profiler counts
// them.
bool nobody_watches();

}  // namespace amp_plugin::op_calls
