// The CPU implementations of our ops, as plain functions. The files that compute therefore do not include
// torch's headers for registering ops, which would take a third of their compile time.
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

// Returns the factor that clipping multiplies gradients by.
float clip_factor_of(float norm, double max_norm, const OptionalTensor& found_inf);
at::Tensor clip_factor(
    const at::Tensor& norm, double max_norm, const OptionalTensor& scale, const OptionalTensor& found_inf);
at::Tensor judge_step_(
    at::TensorList values, const at::Tensor& norm, const at::Tensor& found_inf, const at::Tensor& statistics,
    at::TensorList growth_trackers, double sigma, int64_t window, int64_t warmup, double least_deviation,
    int64_t action);
void update_scale_(
    const at::Tensor& scale, const at::Tensor& growth_tracker, const at::Tensor& hysteresis_tracker,
    const at::Tensor& found_inf, double growth_factor, double backoff_factor, int64_t growth_interval,
    double min_scale, double max_scale, int64_t hysteresis, int64_t mode);

void pack_measurements_(
    const at::Tensor& packed, at::TensorList norms, at::TensorList found_infs, at::IntArrayRef slots,
    at::IntArrayRef replicas, double p);
std::tuple<at::Tensor, at::Tensor> unpack_measurements(at::TensorList packed, double p);

void step_(
    at::TensorList params, at::TensorList grads, at::TensorList states, at::TensorList counters,
    at::TensorList remainders, c10::string_view rule, at::ArrayRef<double> numbers, const OptionalTensor& lr,
    const OptionalTensor& grad_scale, const OptionalTensor& found_inf);

void pack_weights_(at::TensorList masters, at::TensorList high, at::TensorList low);
void unpack_weights_(at::TensorList high, at::TensorList low, at::TensorList masters);
void round_weights_(at::TensorList masters, at::TensorList out, int64_t seed, int64_t step);

}  // namespace amp_plugin
