// The CPU implementations of the ops on lists of tensors, as plain functions. The files that compute
// therefore do not include torch's headers for registering ops, which would take a third of their compile
// time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

namespace amp_plugin {

using Measured = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using OptionalTensor = std::optional<at::Tensor>;

Measured norm_check(at::TensorList grads, const at::Tensor& inv_scale, double p, bool is_scale);
Measured unscale_(at::TensorList grads, const at::Tensor& inv_scale, double p, bool is_scale);
at::Tensor multiply_(
    at::TensorList grads, const at::Tensor& factor, std::optional<double> max_norm,
    const OptionalTensor& found_inf);

void step_(
    at::TensorList params, at::TensorList grads, at::TensorList states, at::TensorList counters,
    at::TensorList remainders, c10::string_view rule, at::ArrayRef<double> numbers, const OptionalTensor& lr,
    const OptionalTensor& grad_scale, const OptionalTensor& found_inf);

void pack_weights_(at::TensorList masters, at::TensorList high, at::TensorList low);
void unpack_weights_(at::TensorList high, at::TensorList low, at::TensorList masters);
void round_weights_(at::TensorList masters, at::TensorList out, int64_t seed, int64_t step);

}  // namespace amp_plugin
