// The rule of an optimizer, and the parts that rules are made of. Both g++ and NVRTC compile the rules.
//
// A rule is a struct that describes what one step does to an element. It has:
//
// - A base class, Counted or Uncounted, which says whether each parameter has a step counter. A rule with a
//   second counter sets kCounters to 2 and defines count_more(numbers, counters), which advances that
//   counter.
// - enum Numbers: the numbers that the rule takes, in the order of weights/one_pass.py. kLr is the first.
// - States: the kind of each state.
// - A constructor (numbers, counters). It computes in float64 everything that is the same for all elements of
//   a parameter. The counters already include this step.
// - operator(), which takes an element, its gradient and its states. It overwrites the states with the new
//   ones and returns the new element.
//
// `Real` is a vector of float32 on the CPU. On a GPU it is a few neighboring float32 elements of one thread.
// csrc/step_arithmetic.h and cuda/arithmetic.cuh define the functions on them; include one of the two before
// this file.
#pragma once

#include "states.h"

namespace amp_plugin::rules {

// Advances the counters of a parameter by one step.
template <typename Rule>
void count_step(const double* numbers, double* counters) {
  if constexpr (Rule::kCounters > 0) counters[0] += 1;
  if constexpr (Rule::kCounters > 1) Rule::count_more(numbers, counters);
}

// step() returns the number of the step. Random rounding is seeded with it.
struct Counted {
  static constexpr unsigned kCounters = 1;
  static double step(const double*, const double* counters) { return counters[0]; }
};

struct Uncounted {
  static constexpr unsigned kCounters = 0;
  static double step(const double*, const double*) { return 0; }
};

// The first thing that most rules do with a gradient: negate it to maximize, and add weight decay.
struct Gradient {
  Choice negates, decays;
  float decay;

  Gradient(bool maximize, double decay, bool is_added = true)
      : negates(maximize), decays(is_added && decay != 0), decay(static_cast<float>(decay)) {}

  template <typename Real>
  Real of(const Real& param, const Real& grad) const {
    if (jumps_over(negates, decays)) return grad;
    const Real signed_grad = negates.of(-grad, grad);
    return decays.of(multiply_add(param, Real(decay), signed_grad), signed_grad);
  }
};

// Moves `from` towards `to` by a fraction of the distance, with the same operations as torch.lerp.
struct Lerp {
  float share;
  Choice starts_at_end;

  explicit Lerp(double of_the_way) : share(static_cast<float>(of_the_way)), starts_at_end(share >= 0.5F) {
    if (share >= 0.5F) share -= 1;
  }

  template <typename Real>
  Real of(const Real& from, const Real& to) const {
    return multiply_add(Real(share), to - from, starts_at_end.of(to, from));
  }
};

}  // namespace amp_plugin::rules
