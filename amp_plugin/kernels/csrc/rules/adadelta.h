// Adadelta (Zeiler, 2012). The operations are in the same order as in torch's step with foreach=True.
#pragma once

#include "rule.h"

namespace amp_plugin::rules {

struct Adadelta : Counted {
  enum Numbers { kLr, kRho, kEps, kWeightDecay, kMaximize, kNumbers };
  using States = StateList<kSquare, kSquare>;  // square_avg, acc_delta

  Adadelta(const double* numbers, const double*)
      : gradient(numbers[kMaximize] != 0, numbers[kWeightDecay]),
        rho(static_cast<float>(numbers[kRho])),
        square(static_cast<float>(1 - numbers[kRho])),
        eps(static_cast<float>(numbers[kEps])),
        step_size(static_cast<float>(-numbers[kLr])) {}

  template <typename Real>
  Real operator()(Real param, Real grad, Real* states) const {
    grad = gradient.of(param, grad);
    states[0] = multiply_add(Real(square) * grad, grad, states[0] * Real(rho));
    const Real delta = root(states[1] + Real(eps)) / root(states[0] + Real(eps)) * grad;
    states[1] = multiply_add(Real(square) * delta, delta, states[1] * Real(rho));
    return multiply_add(delta, Real(step_size), param);
  }

 private:
  Gradient gradient;
  float rho, square, eps, step_size;
};

}  // namespace amp_plugin::rules
