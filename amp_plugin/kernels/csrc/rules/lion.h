// Lion (Chen et al., 2023): each element moves by the same amount, in the direction of the sign of its
// momentum.
#pragma once

#include "rule.h"

namespace amp_plugin::rules {

struct Lion : Uncounted {
  enum Numbers { kLr, kBeta1, kBeta2, kWeightDecay, kMaximize, kNumbers };
  using States = StateList<kSigned>;  // exp_avg

  Lion(const double* numbers, const double*)
      : negates(numbers[kMaximize] != 0),
        kept(static_cast<float>(1 - numbers[kLr] * numbers[kWeightDecay])),
        beta1(static_cast<float>(numbers[kBeta1])),
        beta2(static_cast<float>(numbers[kBeta2])),
        share1(static_cast<float>(1 - numbers[kBeta1])),
        share2(static_cast<float>(1 - numbers[kBeta2])),
        step_size(static_cast<float>(-numbers[kLr])) {}

  template <typename Real>
  Real operator()(Real param, Real grad, Real* states) const {
    grad = negates.of(-grad, grad);
    const Real direction = sign_of(multiply_add(grad, Real(share1), states[0] * Real(beta1)));
    states[0] = multiply_add(grad, Real(share2), states[0] * Real(beta2));
    return multiply_add(direction, Real(step_size), param * Real(kept));
  }

 private:
  Choice negates;
  float kept, beta1, beta2, share1, share2, step_size;
};

}  // namespace amp_plugin::rules
