// Runs an optimizer's rule over all rows. Gradients are divided in the pass that reads them.
#pragma once

#include <vector>

#include "step_rows.h"
#include "step_states.h"
#include "step_weights.h"

namespace amp_plugin {

static_assert(Block::kSize <= static_cast<int64_t>(LastBlock::kMostElements));

template <typename Grad>
[[gnu::always_inline]] inline void divide_block(Grad* grads, const Divisor& divisor, Block& grad) {
  grad = {divisor.divide(grad.low), divisor.divide(grad.high)};
  store_block(grads, grad);
}

// A rule is called with a vector of parameters, of gradients and of each state (Rule::kStates of them, which
// it changes) and returns the new parameters. Gradients that are `divided` are written too. `place`: of the
// block within the unit of states that begins at `at - place`.
template <typename Rule, typename Grad, typename WeightType, typename States, bool divided>
[[gnu::always_inline]] inline void step_block(
    const Row& row, const Divisor& divisor, const Rule& rule, States& states, int64_t at, int64_t place) {
  auto* grads = static_cast<Grad*>(row.grad) + at;
  Block grad = load_block(grads);
  const Block param = WeightType::load(row, at);
  Floats low[Rule::kStates + 1];
  Floats high[Rule::kStates + 1];
  for (size_t i = 0; i < Rule::kStates; ++i) {
    const Block state = states.load(i, place);
    low[i] = state.low;
    high[i] = state.high;
  }
  if constexpr (divided) divide_block(grads, divisor, grad);
  const Block stepped = {rule(param.low, grad.low, low), rule(param.high, grad.high, high)};
  for (size_t i = 0; i < Rule::kStates; ++i) states.store(i, place, {low[i], high[i]});
  WeightType::store(row, at, stepped);
}

// Whole units of states. Row and rule come by value: what is stored through the row's pointers cannot be
// theirs, so that they stay in registers.
template <typename Rule, typename Grad, typename WeightType, typename States, bool divided>
void step_range(const Row row, int64_t begin, int64_t end, const Divisor divisor, const Rule rule) {
  States states(row, rule.seed);
  for (int64_t at = begin; at < end; at += States::kUnit) {
    states.begin(at);
    for (int64_t place = 0; place < States::kUnit; place += Block::kSize)
      step_block<Rule, Grad, WeightType, States, divided>(row, divisor, rule, states, at + place, place);
    states.end();
  }
  if (begin < end) states.flush();
}

template <typename Rule>
using RangeFunction = void (*)(Row, int64_t, int64_t, Divisor, Rule);

// A loop for each pair of dtypes that has_loop() names.
template <typename Rule, typename States, bool divided>
RangeFunction<Rule> range_function(const Row& row) {
  if (row.weight == Weight::fp32) return step_range<Rule, float, Fp32Weight, States, divided>;
  return row.grad_type == at::kFloat ? step_range<Rule, float, PairedWeight, States, divided>
                                     : step_range<Rule, at::BFloat16, PairedWeight, States, divided>;
}

// And for each way to store states, if there are any.
template <typename Rule, bool divided>
RangeFunction<Rule> range_function(const Row& row) {
  if constexpr (Rule::kStates > 0) {
    if (row.state == State::bfloat16) return range_function<Rule, Bf16States<Rule::kStates>, divided>(row);
    if (row.state == State::codes) return range_function<Rule, CodedStates<Rule::kStates>, divided>(row);
  }
  return range_function<Rule, Fp32States<Rule::kStates>, divided>(row);
}

template <typename Rule>
void step_elements(const Row& row, int64_t begin, int64_t end, const Divisor& divisor, const Rule& rule) {
  const bool divided = !divisor.is_one();
  const auto step = divided ? range_function<Rule, true>(row) : range_function<Rule, false>(row);
  const int64_t unit = row.state == State::fp32 ? Block::kSize : kCodeBlock;
  const int64_t whole = begin + (end - begin) / unit * unit;
  step(row, begin, whole, divisor, rule);
  if (whole == end) return;
  LastBlock last(row, whole, end - whole);
  step(last.row(), 0, unit, divisor, rule);
  if (divided) last.write_gradient_back();
  last.write_rest_back();
}

// Apply rules[i] to rows[i]. Every element is worked on alone, so results do not depend on the threads.
template <typename Rule>
void run_rows(const std::vector<Row>& rows, const Divisor& divisor, const std::vector<Rule>& rules) {
  for_each_range(rows, [&](size_t row, int64_t begin, int64_t end) {
    step_elements(rows[row], begin, end, divisor, rules[row]);
  });
}

// A step that is skipped: gradients are divided, and nothing else is written.
void divide_gradients(const StepRows& rows, const Divisor& divisor);

}  // namespace amp_plugin
