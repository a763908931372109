// Looks up the rules of rules/all.h by name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "rules/states.h"

namespace amp_plugin {

class Divisor;
struct Row;

struct StepRule {
  std::string_view name;
  size_t numbers;
  size_t counters;  // counters per parameter
  std::vector<rules::StateKind> states;

  // Constructs the rule for one step of one parameter, in memory of kMostBytes. `counters` hold the values
  // before the step and are advanced. Returns the seed of random rounding.
  uint32_t (*make)(void* place, const double* numbers, double* counters);
  // Applies the constructed rule to elements [begin, end) of a row. The range must consist of whole units of
  // the states.
  void (*step)(
      const Row& row, int64_t begin, int64_t end, const Divisor& divisor, const void* made, uint32_t seed);

  static constexpr size_t kMostBytes = 128;
};

const std::vector<StepRule>& step_rules();

// One line per rule, "name numbers counters kinds...", for tests.
std::vector<std::string> described_rules();

// Looks up a rule. Raises ValueError if the name is unknown, or if the rule takes another count of numbers.
const StepRule& step_rule(std::string_view name, size_t numbers);

}  // namespace amp_plugin
