// The op step_ on the CPU.

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "cpu_ops.h"
#include "one_value.h"
#include "step_rows.h"
#include "step_weights.h"

namespace amp_plugin {
namespace {

// The rule, prepared for one step on the elements of a row.
struct RowStep {
  uint32_t seed = 0;  // the seed of random rounding
  alignas(16) std::array<std::byte, StepRule::kMostBytes> made;
};

// Calls run(row, begin, end) for the whole units of a range. The elements after the last whole unit are
// copied into a row of their own, on which `run` is called too. `written` says which tensors of that row to
// copy back.
template <typename Run>
void in_whole_units(
    const Row& row, int64_t begin, int64_t end, int64_t unit, LastBlock::Written written, Run&& run) {
  const int64_t whole = begin + (end - begin) / unit * unit;
  run(row, begin, whole);
  if (whole == end) return;
  LastBlock last(row, whole, end - whole);
  run(last.row(), 0, unit);
  last.write_back(written);
}

template <typename Grad>
void divide_range(const Row& row, int64_t begin, int64_t end, const Divisor& divisor) {
  for (int64_t at = begin; at < end; at += Block::kSize) {
    auto* grads = static_cast<Grad*>(row.grad) + at;
    const Block grad = load_block(grads);
    store_block(grads, Block{divisor.divide(grad.low), divisor.divide(grad.high)});
  }
}

// Carries out a skipped step: it divides the gradients and writes nothing else.
void divide_gradients(const StepRows& rows, const Divisor& divisor) {
  if (divisor.is_one()) return;
  for_each_range(rows.rows(), [&](size_t row, int64_t begin, int64_t end) {
    const auto run = [&](const Row& part, int64_t first, int64_t last) {
      const auto divide = part.grad_type == at::kFloat ? divide_range<float> : divide_range<at::BFloat16>;
      divide(part, first, last, divisor);
    };
    in_whole_units(rows.rows()[row], begin, end, Block::kSize, {true, false}, run);
  });
  rows.finish_gradients();
}

double read_counter(const at::Tensor& counter) {
  return counter.scalar_type() == at::kFloat ? *counter.const_data_ptr<float>()
                                             : *counter.const_data_ptr<double>();
}

void write_counter(const at::Tensor& counter, double value) {
  if (counter.scalar_type() == at::kFloat) {
    *counter.mutable_data_ptr<float>() = static_cast<float>(value);
  } else {
    *counter.mutable_data_ptr<double>() = value;
  }
}

// Prepares the rule for each row, and writes the counters.
std::vector<RowStep> steps_of(const StepTensors& tensors, const StepRule& rule, const double* numbers) {
  using Counters = std::array<double, cuda::kMostCounters>;
  std::vector<RowStep> steps;
  steps.reserve(tensors.params.size());
  Counters before{}, after{};
  for (size_t i = 0; i < tensors.params.size(); ++i) {
    Counters counters{};
    for (size_t k = 0; k < rule.counters; ++k) counters[k] = read_counter(tensors.counter(k, i));
    if (i > 0 && counters == before) {  // usually all parameters have taken the same number of steps
      steps.push_back(steps.back());
    } else {
      before = after = counters;
      RowStep& step = steps.emplace_back();
      step.seed = rule.make(step.made.data(), numbers, after.data());
    }
    for (size_t k = 0; k < rule.counters; ++k) write_counter(tensors.counter(k, i), after[k]);
  }
  return steps;
}

}  // namespace

void step_(
    at::TensorList params, at::TensorList grads, at::TensorList states, at::TensorList counters,
    at::TensorList remainders, c10::string_view name, at::ArrayRef<double> numbers, const OptionalTensor& lr,
    const OptionalTensor& grad_scale, const OptionalTensor& found_inf) {
  const StepRule& rule = step_rule(name, numbers.size());
  const Divisor divisor(grad_scale ? one_value(*grad_scale, "grad_scale") : 1.0);
  const StepTensors tensors{params, grads, states, counters, remainders};
  const StepRows rows(tensors, rule, !divisor.is_one(), c10::kCPU);
  if (found_inf && one_value(*found_inf, "found_inf") > 0) return divide_gradients(rows, divisor);
  std::vector<double> values(numbers.begin(), numbers.end());
  if (lr) values.front() = one_value(*lr, "lr");  // the learning rate is the first number of every rule
  const std::vector<RowStep> steps = steps_of(tensors, rule, values.data());
  const LastBlock::Written written{!divisor.is_one(), true};
  for_each_range(rows.rows(), [&](size_t i, int64_t begin, int64_t end) {
    const Row& row = rows.rows()[i];
    const auto run = [&](const Row& part, int64_t first, int64_t last) {
      rule.step(part, first, last, divisor, steps[i].made.data(), steps[i].seed);
    };
    const int64_t unit = row.format == State::fp32 ? Block::kSize : kCodeBlock;
    in_whole_units(row, begin, end, unit, written, run);
  });
  rows.finish();
}

}  // namespace amp_plugin
