// RMSprop (Tieleman and Hinton, 2012), with or without momentum, centered (Graves, 2013) or not. The
// operations are in the same order as in torch's step with foreach=True.
#pragma once

#include "rule.h"

namespace amp_plugin::rules {

template <bool centered>
struct Rmsprop : Counted {
  enum Numbers { kLr, kAlpha, kEps, kWeightDecay, kMaximize, kMomentum, kNumbers };
  using States = Select<centered, StateList<kSquare, kSigned>, StateList<kSquare>>;  // square_avg, grad_avg

  Rmsprop(const double* numbers, const double*)
      : gradient(numbers[kMaximize] != 0, numbers[kWeightDecay]),
        average(1 - numbers[kAlpha]),
        alpha(static_cast<float>(numbers[kAlpha])),
        square(static_cast<float>(1 - numbers[kAlpha])),
        eps(static_cast<float>(numbers[kEps])),
        step_size(static_cast<float>(-numbers[kLr])) {}

  template <typename Real>
  Real operator()(Real param, Real grad, Real* states) const {
    grad = gradient.of(param, grad);
    return param + Real(step_size) * grad / denominator(grad, states);
  }

 protected:
  // Updates the averages and returns the denominator. `grad` already includes weight decay.
  template <typename Real>
  Real denominator(const Real& grad, Real* states) const {
    states[0] = multiply_add(Real(square) * grad, grad, states[0] * Real(alpha));
    Real variance = states[0];
    if constexpr (centered) {
      states[1] = average.of(states[1], grad);
      variance = multiply_add(-states[1], states[1], variance);
    }
    return root(variance) + Real(eps);
  }

  Gradient gradient;
  Lerp average;
  float alpha, square, eps, step_size;
};

template <bool centered>
struct RmspropMomentum : Rmsprop<centered> {
  using Base = Rmsprop<centered>;
  // The states of Rmsprop, and momentum_buffer.
  using States = Select<centered, StateList<kSquare, kSigned, kSigned>, StateList<kSquare, kSigned>>;

  RmspropMomentum(const double* numbers, const double* counters)
      : Base(numbers, counters), momentum(static_cast<float>(numbers[Base::kMomentum])) {}

  template <typename Real>
  Real operator()(Real param, Real grad, Real* states) const {
    Real& buffer = states[States::kCount - 1];
    grad = this->gradient.of(param, grad);
    buffer = buffer * Real(momentum) + grad / this->denominator(grad, states);
    return multiply_add(buffer, Real(this->step_size), param);
  }

 private:
  float momentum;
};

}  // namespace amp_plugin::rules
