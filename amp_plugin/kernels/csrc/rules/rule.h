// What the rule of an optimizer is made of. g++ and NVRTC both compile the rules.
//
// A rule is a struct that tells what one step does to an element. It has:
//
// - Counted or Uncounted as its base, which says whether a parameter has a counter of its steps. If there is
// a
//   second counter, kCounters is 2, and count_more(numbers, counters) changes it.
// - enum Numbers: the numbers that it is given, in the order of weights/one_pass.py. kLr is the first.
// - States: what each of its states holds.
// - A constructor of (numbers, counters). It works out in float64 what is the same for all elements of a
//   parameter. The counters count this step already.
// - operator(), which takes an element, its gradient and its states. It writes the new states over the old
//   ones, and returns the new element.
//
// `Real` is a vector of float32 on the CPU, and a few neighbouring float32 of a thread on a GPU.
// csrc/step_arithmetic.h and cuda/arithmetic.cuh have the functions on them; one of the two is included
// before this.
#pragma once

#include "states.h"

namespace amp_plugin::rules {

// Let the counters of a parameter count a step of a rule.
template <typename Rule>
void count_step(const double* numbers, double* counters) {
  if constexpr (Rule::kCounters > 0) counters[0] += 1;
  if constexpr (Rule::kCounters > 1) Rule::count_more(numbers, counters);
}

// step(): the number of the step, which draws what is rounded at random.
struct Counted {
  static constexpr unsigned kCounters = 1;
  static double step(const double*, const double* counters) { return counters[0]; }
};

struct Uncounted {
  static constexpr unsigned kCounters = 0;
  static double step(const double*, const double*) { return 0; }
};

// What most rules do with a gradient first: change its sign to maximize, and add weight decay.
struct Gradient {
  Choice negates, decays;
  float decay;

  Gradient() = default;
  Gradient(bool maximize, double decay, bool is_added = true)
      : negates(maximize), decays(is_added && decay != 0), decay(static_cast<float>(decay)) {}

  template <typename Real>
  Real of(const Real& param, const Real& grad) const {
    const Real signed_grad = negates.of(-grad, grad);
    return decays.of(multiply_add(param, Real(decay), signed_grad), signed_grad);
  }
};

// Move `from` a share of the way to `to`, as torch's lerp computes it.
struct Lerp {
  float share;
  Choice starts_at_end;

  Lerp() = default;
  explicit Lerp(double of_the_way) : share(static_cast<float>(of_the_way)), starts_at_end(share >= 0.5F) {
    if (share >= 0.5F) share -= 1;
  }

  template <typename Real>
  Real of(const Real& from, const Real& to) const {
    return multiply_add(Real(share), to - from, starts_at_end.of(to, from));
  }
};

}  // namespace amp_plugin::rules
