// The loop over the elements of a parameter, for every rule and every storage format. Gradients are divided
// in the same pass.
#pragma once

#include "step_rows.h"
#include "step_states.h"
#include "step_weights.h"

namespace amp_plugin {

static_assert(Block::kSize <= static_cast<int64_t>(LastBlock::kMostElements));

// Steps one block. Divided gradients are written back if `divided`. `place` is the position of the block
// within its unit of states, which begins at `at - place`.
template <typename Rule, typename Grad, typename WeightType, typename States>
[[gnu::always_inline]] inline void step_block(
    const Row& row, const Divisor& divisor, bool divided, const Rule& rule, States& states, int64_t at,
    int64_t place) {
  constexpr size_t kStates = Rule::States::kCount;
  // States that are weights are float32, whatever the format of the others.
  const auto is_weight = [](size_t i) { return Rule::States::kind(i) == rules::kWeight; };
  const auto weight = [&](size_t i) { return static_cast<float*>(row.states[i]) + at; };
  auto* grads = static_cast<Grad*>(row.grad) + at;
  Block grad = load_block(grads);
  const Block param = WeightType::load(row, at);
  Floats low[kStates + 1];
  Floats high[kStates + 1];
  for (size_t i = 0; i < kStates; ++i) {
    const Block state = is_weight(i) ? load_block(weight(i)) : states.load(i, place);
    low[i] = state.low;
    high[i] = state.high;
  }
  grad = {divisor.divide(grad.low), divisor.divide(grad.high)};
  if (divided) store_block(grads, grad);
  const Block stepped = {rule(param.low, grad.low, low), rule(param.high, grad.high, high)};
  for (size_t i = 0; i < kStates; ++i) {
    if (is_weight(i)) {
      store_block(weight(i), {low[i], high[i]});
    } else {
      states.store(i, place, {low[i], high[i]});
    }
  }
  WeightType::store(row, at, stepped);
}

// Steps whole units of states. `row` and `rule` are passed by value: the compiler then knows that stores
// through the row's pointers cannot change them, and keeps them in registers.
template <typename Rule, typename Grad, typename WeightType, typename States>
void step_range(
    const Row row, int64_t begin, int64_t end, const Divisor divisor, const Rule rule, uint32_t seed) {
  const bool divided = !divisor.is_one();
  States states(row, seed);
  for (int64_t at = begin; at < end; at += States::kUnit) {
    states.begin(at);
    for (int64_t place = 0; place < States::kUnit; place += Block::kSize)
      step_block<Rule, Grad, WeightType>(row, divisor, divided, rule, states, at + place, place);
    states.end();
  }
  if (begin < end) states.flush();
}

// Chooses the loop by the dtypes of the parameter and its gradient.
template <typename Rule, typename States, typename... Arguments>
void step_as_stored(const Row& row, const Arguments&... arguments) {
  if (!row.is_pair) {
    step_range<Rule, float, Fp32Weight, States>(row, arguments...);
  } else if (row.grad_type == at::kFloat) {
    step_range<Rule, float, PairedWeight, States>(row, arguments...);
  } else {
    step_range<Rule, at::BFloat16, PairedWeight, States>(row, arguments...);
  }
}

// Chooses the loop by the storage format of the states, if the rule has states.
template <typename Rule>
void step_units(
    const Row& row, int64_t begin, int64_t end, const Divisor& divisor, const Rule& rule, uint32_t seed) {
  using List = typename Rule::States;
  if constexpr (List::kCount > 0) {
    if (row.format == State::bfloat16)
      return step_as_stored<Rule, PlainStates<List, at::BFloat16>>(row, begin, end, divisor, rule, seed);
    if (row.format == State::codes)
      return step_as_stored<Rule, CodedStates<List>>(row, begin, end, divisor, rule, seed);
  }
  step_as_stored<Rule, PlainStates<List, float>>(row, begin, end, divisor, rule, seed);
}

}  // namespace amp_plugin
