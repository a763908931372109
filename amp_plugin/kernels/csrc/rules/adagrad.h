// Adagrad (Duchi et al., 2011). The operations are in the same order as in torch's fused CPU kernel.
#pragma once

#include "rule.h"

namespace amp_plugin::rules {

struct Adagrad : Counted {
  enum Numbers { kLr, kLrDecay, kEps, kWeightDecay, kMaximize, kNumbers };
  using States = StateList<kSquare>;  // sum

  Adagrad(const double* numbers, const double* counters)
      : gradient(numbers[kMaximize] != 0, numbers[kWeightDecay]),
        eps(static_cast<float>(numbers[kEps])),
        step_size(static_cast<float>(numbers[kLr] / (1 + (counters[0] - 1) * numbers[kLrDecay]))) {}

  template <typename Real>
  Real operator()(Real param, Real grad, Real* states) const {
    grad = gradient.of(param, grad);
    states[0] = multiply_add(grad, grad, states[0]);
    return param - Real(step_size) * grad / (root(states[0]) + Real(eps));
  }

 private:
  Gradient gradient;
  float eps, step_size;
};

}  // namespace amp_plugin::rules
