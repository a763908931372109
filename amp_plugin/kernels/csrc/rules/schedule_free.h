// Schedule-free AdamW (Defazio et al., 2024). The parameter is y, which lies between the average x and the
// point z that the steps move. The operations are in the same order as in the foreach step of schedulefree's
// AdamWScheduleFree.
#pragma once

#include "rule.h"

namespace amp_plugin::rules {

struct ScheduleFree : Uncounted {
  // These are the values for this step, with warm-up applied. kShare is the fraction of the way from y to z
  // that y moves. kYStep is what the normalized update is multiplied by before it is added to y.
  enum Numbers { kLr, kBeta2, kEps, kWeightDecay, kCorrection2, kShare, kYStep, kSteps, kNumbers };
  using States = StateList<kSquare, kWeight>;  // exp_avg_sq, z

  static double step(const double* numbers, const double*) { return numbers[kSteps]; }

  ScheduleFree(const double* numbers, const double*)
      : decays(numbers[kWeightDecay] != 0),
        decay(static_cast<float>(numbers[kWeightDecay])),
        beta2(static_cast<float>(numbers[kBeta2])),
        square(static_cast<float>(1 - numbers[kBeta2])),
        eps(static_cast<float>(numbers[kEps])),
        y_step(static_cast<float>(numbers[kYStep])),
        z_step(static_cast<float>(-numbers[kLr])),
        correction(static_cast<float>(numbers[kCorrection2])),
        average(numbers[kShare]) {}

  template <typename Real>
  Real operator()(Real param, Real grad, Real* states) const {
    states[0] = multiply_add(Real(square) * grad, grad, states[0] * Real(beta2));
    const Real scaled = grad / (root(correction.divide(states[0])) + Real(eps));
    const Real update = decays.of(multiply_add(param, Real(decay), scaled), scaled);
    param = average.of(param, states[1]);
    states[1] = multiply_add(update, Real(z_step), states[1]);
    return multiply_add(update, Real(y_step), param);
  }

 private:
  Choice decays;
  float decay, beta2, square, eps, y_step, z_step;
  Divisor correction;
  Lerp average;
};

}  // namespace amp_plugin::rules
