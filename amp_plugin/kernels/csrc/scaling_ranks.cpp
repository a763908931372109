// pack_measurements_ and unpack_measurements on the CPU. They process a few scalars; see
// kernels/reference.py.

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "cpu_ops.h"
#include "one_value.h"
#include "packed_measurements.h"
#include "tensor_memory.h"

namespace amp_plugin {
namespace {

bool has_no_power(double p) { return p == 0.0 || std::isinf(p); }

// Computes a power as torch.pow does, which treats these exponents specially and exactly.
double raised(double value, double exponent) {
  if (exponent == 2.0) return value * value;
  if (exponent == 0.5) return std::sqrt(value);
  return exponent == 1.0 ? value : std::pow(value, exponent);
}

double neutral(double p) { return p < 0 && std::isinf(p) ? p : 0.0; }

double join(double a, double b, double p) {
  if (!std::isinf(p)) return a + b;
  return b > a || std::isnan(b) ? b : a;  // a NaN counts as the largest
}

}  // namespace

void pack_measurements_(
    const at::Tensor& packed, at::TensorList norms, at::TensorList found_infs, at::IntArrayRef slots,
    at::IntArrayRef replicas, double p) {
  check_packing(packed, norms, slots, replicas);
  auto* values = packed.mutable_data_ptr<double>();
  std::fill_n(values, replicas.size(), neutral(p));
  for (size_t i = 0; i < norms.size(); ++i) {
    const double norm = one_value(norms[i], "a norm");
    double& value = values[slots[i]];
    value = join(value, has_no_power(p) ? (p < 0 ? -norm : norm) : raised(norm, p), p);
  }
  if (!std::isinf(p)) {
    for (size_t slot = 0; slot < replicas.size(); ++slot) values[slot] /= static_cast<double>(replicas[slot]);
  }
  double found = 0.0;
  for (const at::Tensor& flag : found_infs) found = std::max(found, one_value(flag, "found_inf"));
  values[replicas.size()] = found;
  increment_versions({packed});
}

std::tuple<at::Tensor, at::Tensor> unpack_measurements(at::TensorList packed, double p) {
  check_packed(packed);
  double total = neutral(p), found = 0.0;
  for (const at::Tensor& values : packed) {
    const auto* value = values.const_data_ptr<double>();
    const int64_t count = values.numel() - 1;
    for (int64_t i = 0; i < count; ++i) total = join(total, value[i], p);
    found = value[count];
  }
  const double norm = has_no_power(p) ? (p < 0 ? -total : total) : raised(total, 1.0 / p);
  return {tensor_of(norm), tensor_of(found > 0.0 ? 1.0 : 0.0)};
}

}  // namespace amp_plugin
