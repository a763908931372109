#include "step_rules.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <new>
#include <type_traits>

#include "step_run.h"
// In a block of its own, so that it comes last: the rules need the arithmetic above.
#include "rules/all.h"

namespace amp_plugin {
namespace {

template <typename Rule>
uint32_t make(void* place, const double* numbers, double* counters) {
  static_assert(sizeof(Rule) <= StepRule::kMostBytes && std::is_trivially_destructible_v<Rule>);
  rules::count_step<Rule>(numbers, counters);
  new (place) Rule(numbers, counters);
  return cuda::seed_of(Rule::step(numbers, counters));
}

template <typename Rule>
void step(
    const Row& row, int64_t begin, int64_t end, const Divisor& divisor, const void* made, uint32_t seed) {
  step_units(row, begin, end, divisor, *static_cast<const Rule*>(made), seed);
}

template <typename Rule>
StepRule rule_of(std::string_view name) {
  std::vector<rules::StateKind> states;
  for (unsigned k = 0; k < Rule::States::kCount; ++k) states.push_back(Rule::States::kind(k));
  return {name, Rule::kNumbers, Rule::kCounters, std::move(states), make<Rule>, step<Rule>};
}

}  // namespace

const std::vector<StepRule>& step_rules() {
#define AMP_PLUGIN_RULE_OF(name, ...) rule_of<rules::__VA_ARGS__>(#name),
  static const std::vector<StepRule> all{AMP_PLUGIN_RULES(AMP_PLUGIN_RULE_OF)};
#undef AMP_PLUGIN_RULE_OF
  return all;
}

std::vector<std::string> described_rules() {
  std::vector<std::string> described;
  for (const StepRule& rule : step_rules()) {
    auto& text = described.emplace_back(c10::str(rule.name, " ", rule.numbers, " ", rule.counters));
    for (const rules::StateKind kind : rule.states) text += " " + std::to_string(static_cast<int>(kind));
  }
  return described;
}

const StepRule& step_rule(std::string_view name, size_t numbers) {
  const auto& all = step_rules();
  const auto found =
      std::find_if(all.begin(), all.end(), [&](const auto& rule) { return rule.name == name; });
  if (found == all.end()) {
    std::vector<std::string_view> names;
    for (const StepRule& rule : all) names.push_back(rule.name);
    TORCH_CHECK_VALUE(false, "step_: there is no rule ", name, "; give one of ", c10::Join(", ", names), ".");
  }
  TORCH_CHECK_VALUE(
      found->numbers == numbers, "step_: got ", numbers, " numbers for the rule ", name, "; give ",
      found->numbers, ", in the order of the rule's enum in kernels/csrc/rules.");
  return *found;
}

}  // namespace amp_plugin
