// step: a whole optimizer step over all parameters of a table. It is compiled once per rule, for example with
// -DRULE=adam; csrc/rules/all.h has the names.
//
// If found_inf is above 0, the kernel only divides the gradients by grad_scale. The last block increases the
// step counters, after all blocks have read them. Memory traffic, if everything is float32 and the gradients
// have B bytes: B bytes are read for the gradients, the parameters and each state, and as many are written.
// If grad_scale is 1, the gradients are not written.
#include "step_rows.cuh"
// In a block of its own, so that it comes last: the rules need the arithmetic above.
#include "../csrc/rules/all.h"

using namespace amp_plugin;
using namespace amp_plugin::cuda;

namespace amp_plugin::rules::named {
#define AMP_PLUGIN_NAMED(name, ...) using name = __VA_ARGS__;
AMP_PLUGIN_RULES(AMP_PLUGIN_NAMED)
}  // namespace amp_plugin::rules::named

using Rule = rules::named::RULE;

// The numbers of the rule. If the learning rate is on the device, it replaces the first number.
struct GivenNumbers {
  double value[kMostNumbers];

  __device__ GivenNumbers(const StepNumbers& numbers, const DeviceScalar& lr) {
    for (u32 i = 0; i < Rule::kNumbers; ++i) value[i] = numbers.value[i];
    value[Rule::kLr] = read_or(lr, value[Rule::kLr]);
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    step(Table table, StepNumbers numbers, DeviceScalar lr, DeviceScalar grad_scale, DeviceScalar found_inf) {
  const Divisor divisor(float(read_or(grad_scale, 1)));
  if (read_or(found_inf, 0) > 0) return divide_all(table, divisor);
  // Bytes, because a variable in shared memory must not have a constructor.
  alignas(Rule) __shared__ u8 memory[sizeof(Rule)];
  Rule& rule = reinterpret_cast<Rule&>(memory);
  __shared__ u32 seed;
  Counters known;
  bool is_known = false;
  for_each_piece(table, [&](const Row&, u32 tensor, u32 begin, u32 end) {
    const Parameter parameter(table, tensor);
    const Counters counters = parameter.counters<Rule::kCounters>();
    if (!is_known || !(counters == known)) {  // usually all parameters have taken the same number of steps
      __syncthreads();  // wait until no thread uses the previous rule
      // One thread constructs the rule. This takes powers in float64, and a GPU has few units for float64.
      if (threadIdx.x == 0) {
        const GivenNumbers given(numbers, lr);
        Counters counted = counters;
        rules::count_step<Rule>(given.value, counted.value);
        rule = Rule(given.value, counted.value);
        seed = seed_of(Rule::step(given.value, counted.value));
      }
      __syncthreads();
      known = counters, is_known = true;
    }
    step_piece(parameter, begin, end, divisor, rule, seed);
  });
  if constexpr (Rule::kCounters > 0) {
    if (!comes_last(table.ticket)) return;
    const GivenNumbers given(numbers, lr);
    for (u32 tensor = threadIdx.x; tensor < table.count; tensor += kThreads) {
      const Parameter parameter(table, tensor);
      Counters counters = parameter.counters<Rule::kCounters>();
      rules::count_step<Rule>(given.value, counters.value);
      parameter.write<Rule::kCounters>(counters);
    }
  }
}
