// The op step_ on the CPU.

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "cpu_ops.h"
#include "one_value.h"
#include "step_rows.h"
#include "step_weights.h"
#include "tensor_memory.h"

namespace amp_plugin {
namespace {

// The rule for one step of one parameter.
struct RowStep {
  uint32_t seed = 0;  // the seed of random rounding
  alignas(16) std::array<std::byte, StepRule::kMostBytes> made;
};

// Prepares the rule for each row, and writes the counters.
std::vector<RowStep> steps_of(const StepLists& tensors, const StepRule& rule, const double* numbers) {
  using Counters = std::array<double, cuda::kMostCounters>;
  std::vector<RowStep> steps;
  steps.reserve(tensors.params.size());
  Counters before{}, after{};
  for (size_t i = 0; i < tensors.params.size(); ++i) {
    Counters counters{};
    for (size_t k = 0; k < rule.counters; ++k) counters[k] = one_value(tensors.counter(k, i), "a counter");
    if (i > 0 && counters == before) {  // usually all parameters have taken the same number of steps
      steps.push_back(steps.back());
    } else {
      before = after = counters;
      RowStep& step = steps.emplace_back();
      step.seed = rule.make(step.made.data(), numbers, after.data());
    }
    for (size_t k = 0; k < rule.counters; ++k)
      cuda::write(scalar(tensors.counter(k, i), "a counter", at::kCPU), after[k]);
  }
  return steps;
}

}  // namespace

void step_(
    at::TensorList params, at::TensorList grads, at::TensorList states, at::TensorList counters,
    at::TensorList remainders, c10::string_view name, at::ArrayRef<double> numbers, const OptionalTensor& lr,
    const OptionalTensor& grad_scale, const OptionalTensor& found_inf) {
  const StepRule& rule = step_rule(name, numbers.size());
  const auto scale =
      static_cast<float>(cuda::read_or(optional_scalar(grad_scale, "grad_scale", at::kCPU), 1));
  const StepLists tensors{params, grads, states, counters, remainders};
  const StepRows rows(tensors, rule, scale != 1, c10::kCPU);
  if (cuda::read_or(optional_scalar(found_inf, "found_inf", at::kCPU), 0) > 0) {
    // The step is skipped: only the gradients are divided. This is rare, so torch's ops are fast enough.
    if (scale == 1) return;
    const at::AutoDispatchBelowADInplaceOrView below;
    for (const at::Tensor& grad : grads) grad.div_(scale);
    return increment_versions(grads);
  }
  const Divisor divisor(scale);
  std::vector<double> values(numbers.begin(), numbers.end());
  if (lr) values.front() = one_value(*lr, "lr");  // the learning rate is the first number of every rule
  const std::vector<RowStep> steps = steps_of(tensors, rule, values.data());
  rows.for_each_piece([&](const Row& row, size_t i, int64_t begin, int64_t end) {
    const RowStep& step = steps[i];
    const int64_t unit = row.format == State::fp32 ? Block::kSize : kCodeBlock;
    const int64_t whole = begin + (end - begin) / unit * unit;
    rule.step(row, begin, whole, divisor, step.made.data(), step.seed);
    if (whole == end) return;
    LastBlock last(row, whole, end - whole);
    rule.step(last.row(), 0, unit, divisor, step.made.data(), step.seed);
    last.write_back(scale != 1);
  });
  rows.finish();
}

}  // namespace amp_plugin
