// The rules of rules/all.h by their names.
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
  size_t counters;  // of each parameter
  std::vector<rules::StateKind> states;

  // Makes what a step does to the elements of a parameter, in memory of kMostBytes. `counters` are those
  // before the step, and count it. Returns the seed of what is rounded at random.
  uint32_t (*make)(void* place, const double* numbers, double* counters);
  // Applies it to elements [begin, end) of a row, whole units of them.
  void (*step)(
      const Row& row, int64_t begin, int64_t end, const Divisor& divisor, const void* made, uint32_t seed);

  static constexpr size_t kMostBytes = 128;
};

const std::vector<StepRule>& step_rules();

// Each rule as "name numbers counters kinds...", for tests.
std::vector<std::string> described_rules();

// Raises ValueError for a name that is not known, and for another count of numbers.
const StepRule& step_rule(std::string_view name, size_t numbers);

}  // namespace amp_plugin
