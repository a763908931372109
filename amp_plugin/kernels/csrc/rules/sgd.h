// SGD, with or without momentum. The operations are in the same order as in torch's fused CPU kernel.
#pragma once

#include "rule.h"

namespace amp_plugin::rules {

struct Sgd : Uncounted {
  enum Numbers { kLr, kMomentum, kDampening, kWeightDecay, kNesterov, kMaximize, kNumbers };
  using States = StateList<>;

  Sgd(const double* numbers, const double*)
      : gradient(numbers[kMaximize] != 0, numbers[kWeightDecay]),
        step_size(static_cast<float>(-numbers[kLr])) {}

  template <typename Real>
  Real operator()(Real param, Real grad, Real*) const {
    return multiply_add(gradient.of(param, grad), Real(step_size), param);
  }

 protected:
  Gradient gradient;
  float step_size;
};

struct SgdMomentum : Sgd {
  using States = StateList<kSigned>;  // momentum_buffer

  SgdMomentum(const double* numbers, const double* counters)
      : Sgd(numbers, counters),
        momentum(static_cast<float>(numbers[kMomentum])),
        damped(static_cast<float>(1 - numbers[kDampening])),
        nesterov(numbers[kNesterov] != 0) {}

  template <typename Real>
  Real operator()(Real param, Real grad, Real* states) const {
    grad = gradient.of(param, grad);
    states[0] = multiply_add(Real(damped), grad, states[0] * Real(momentum));
    grad = nesterov.of(multiply_add(states[0], Real(momentum), grad), states[0]);
    return multiply_add(grad, Real(step_size), param);
  }

 private:
  float momentum, damped;
  Choice nesterov;
};

}  // namespace amp_plugin::rules
