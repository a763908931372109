// Runs an optimizer's rule over all rows: gradients are read once and never written.
#pragma once

#include <vector>

#include "step_last_block.h"
#include "step_rows.h"
#include "step_weights.h"

namespace amp_plugin {

static_assert(Block::kSize <= static_cast<int64_t>(LastBlock::kMostElements));

// A rule is called with a vector of parameters, of gradients and of each state (Rule::kStates of them, which
// it changes) and returns the new parameters.
template <typename Rule, typename Grad, typename WeightType>
[[gnu::always_inline]] inline void step_block(const Row& row, const Rule& rule, int64_t at) {
  const Block grad = load_block(static_cast<const Grad*>(row.grad) + at);
  const Block param = WeightType::load(row, at);
  Floats low[Rule::kStates + 1];
  Floats high[Rule::kStates + 1];
  for (size_t i = 0; i < Rule::kStates; ++i) {
    const Block state = load_block(row.states[i] + at);
    low[i] = state.low;
    high[i] = state.high;
  }
  const Block stepped = {rule(param.low, grad.low, low), rule(param.high, grad.high, high)};
  for (size_t i = 0; i < Rule::kStates; ++i) {
    store_block(row.states[i] + at, {low[i], high[i]});
  }
  WeightType::store(row, at, stepped);
}

// Whole blocks. Row and rule come by value: what is stored through the row's pointers cannot be theirs, so
// that they stay in registers.
template <typename Rule, typename Grad, typename WeightType>
void step_range(const Row row, int64_t begin, int64_t end, const Rule rule) {
  for (int64_t at = begin; at < end; at += Block::kSize) step_block<Rule, Grad, WeightType>(row, rule, at);
}

template <typename Rule>
using RangeFunction = void (*)(Row, int64_t, int64_t, Rule);

// A loop for each pair of dtypes that has_loop() names.
template <typename Rule>
RangeFunction<Rule> range_function(const Row& row) {
  using at::BFloat16, at::Half;
  const bool wide = row.grad_type == at::kFloat;
  switch (row.weight) {
    case Weight::fp32_and_half:
      return wide ? step_range<Rule, float, CopiedWeight<Half>> : step_range<Rule, Half, CopiedWeight<Half>>;
    case Weight::fp32_and_bfloat16:
      return wide ? step_range<Rule, float, CopiedWeight<BFloat16>>
                  : step_range<Rule, BFloat16, CopiedWeight<BFloat16>>;
    case Weight::bfloat16_pair:
      return wide ? step_range<Rule, float, PairedWeight> : step_range<Rule, BFloat16, PairedWeight>;
    default: return step_range<Rule, float, Fp32Weight>;
  }
}

template <typename Rule>
void step_elements(const Row& row, int64_t begin, int64_t end, const Rule& rule) {
  const RangeFunction<Rule> step = range_function<Rule>(row);
  const int64_t whole = begin + (end - begin) / Block::kSize * Block::kSize;
  step(row, begin, whole, rule);
  if (whole == end) return;
  LastBlock last(row, whole, end - whole);
  step(last.row(), 0, Block::kSize, rule);
  last.write_back();
}

// Apply rules[i] to rows[i]. Every element is worked on alone, so results do not depend on the threads.
template <typename Rule>
void run_rows(const std::vector<Row>& rows, const std::vector<Rule>& rules) {
  for_each_range(rows, [&](size_t row, int64_t begin, int64_t end) {
    step_elements(rows[row], begin, end, rules[row]);
  });
}

}  // namespace amp_plugin
