// Adam (Kingma and Ba, 2015), and AdamW if weight decay is decoupled (Loshchilov and Hutter, 2019). The
// operations are in the same order as in torch's fused CPU kernel.
#pragma once

#include "rule.h"

namespace amp_plugin::rules {

// The part that Adam, NAdam and RAdam share: weight decay and the update of the moments.
struct Moments : Counted {
  enum Numbers { kLr, kBeta1, kBeta2, kEps, kWeightDecay, kDecoupled, kMaximize, kNumbers };
  using States = StateList<kSigned, kSquare>;  // exp_avg, exp_avg_sq

  explicit Moments(const double* numbers)
      : gradient(numbers[kMaximize] != 0, numbers[kWeightDecay], numbers[kDecoupled] == 0),
        kept(static_cast<float>(1 - numbers[kLr] * numbers[kWeightDecay] * numbers[kDecoupled])),
        first(1 - numbers[kBeta1]),
        beta2(static_cast<float>(numbers[kBeta2])),
        square(static_cast<float>(1 - numbers[kBeta2])),
        eps(static_cast<float>(numbers[kEps])) {}

 protected:
  template <typename Real>
  void move(Real& param, Real& grad, Real* states) const {
    grad = gradient.of(param, grad);
    param = param * Real(kept);
    states[0] = first.of(states[0], grad);
    states[1] = multiply_add(Real(square) * grad, grad, states[1] * Real(beta2));
  }

  Gradient gradient;
  float kept;
  Lerp first;
  float beta2, square, eps;
};

template <bool amsgrad>
struct Adam : Moments {
  // The states of Moments, and with amsgrad max_exp_avg_sq.
  using States = Select<amsgrad, StateList<kSigned, kSquare, kSecondSquare>, Moments::States>;

  Adam(const double* numbers, const double* counters)
      : Moments(numbers),
        step_size(static_cast<float>(-numbers[kLr] / (1 - pow(numbers[kBeta1], counters[0])))),
        correction(static_cast<float>(sqrt(1 - pow(numbers[kBeta2], counters[0])))) {}

  template <typename Real>
  Real operator()(Real param, Real grad, Real* states) const {
    move(param, grad, states);
    if constexpr (amsgrad) states[2] = larger(magnitude(states[2]), magnitude(states[1]));
    const Real& second = states[amsgrad ? 2 : 1];
    return param + over_root(Real(step_size) * states[0], second, correction, eps);
  }

 private:
  float step_size;
  Divisor correction;
};

}  // namespace amp_plugin::rules
