// NAdam (Dozat, 2016), RAdam (Liu et al., 2020) and Adamax (Kingma and Ba, 2015): other optimizers that use
// Adam's moments. The operations are in the same order as in torch's steps with foreach=True.
#pragma once

#include "adam.h"

namespace amp_plugin::rules {

struct Nadam : Moments {
  enum More { kMomentumDecay = Moments::kNumbers, kNumbers };
  static constexpr unsigned kCounters = 2;  // steps, mu_product

  static double mu(const double* numbers, double step) {
    return numbers[kBeta1] * (1 - 0.5 * pow(0.96, step * numbers[kMomentumDecay]));
  }
  static void count_more(const double* numbers, double* counters) {
    counters[1] = static_cast<float>(counters[1] * static_cast<float>(mu(numbers, counters[0])));
  }

  Nadam(const double* numbers, const double* counters)
      : Moments(numbers), correction(static_cast<float>(sqrt(1 - pow(numbers[kBeta2], counters[0])))) {
    const double now = mu(numbers, counters[0]), next = mu(numbers, counters[0] + 1);
    of_grad = static_cast<float>(-numbers[kLr] * (1 - now) / (1 - counters[1]));
    of_average = static_cast<float>(-numbers[kLr] * next / (1 - counters[1] * next));
  }

  template <typename Real>
  Real operator()(Real param, Real grad, Real* states) const {
    move(param, grad, states);
    const Real denominator = correction.divide(root(states[1])) + Real(eps);
    param = param + Real(of_grad) * grad / denominator;
    return param + Real(of_average) * states[0] / denominator;
  }

 private:
  Divisor correction;
  float of_grad, of_average;
};

struct Radam : Moments {
  Radam(const double* numbers, const double* counters) : Moments(numbers) {
    const double step = counters[0], power = pow(numbers[kBeta2], step), most = 2 / (1 - numbers[kBeta2]) - 1;
    const double length = most - 2 * step * power / (1 - power), lr = numbers[kLr];
    const double correction = 1 - pow(numbers[kBeta1], step);
    // 0: in the first steps the variance of the second moment is infinite, and it is not used
    double rectified = 0;
    if (length > 5) rectified = sqrt((length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length));
    plain = static_cast<float>(rectified > 0 ? -0.0 : -lr / correction);
    adaptive = Divisor(static_cast<float>(-sqrt(1 - power) * (lr * rectified / correction)));
  }

  template <typename Real>
  Real operator()(Real param, Real grad, Real* states) const {
    move(param, grad, states);
    const Real factor = Real(1.0F) / adaptive.divide(root(states[1]) + Real(eps)) + Real(plain);
    return multiply_add(states[0], factor, param);
  }

 private:
  Divisor adaptive;
  float plain;
};

struct Adamax : Counted {
  enum Numbers { kLr, kBeta1, kBeta2, kEps, kWeightDecay, kMaximize, kNumbers };
  using States = StateList<kSigned, kSquare>;  // exp_avg, exp_inf

  Adamax(const double* numbers, const double* counters)
      : gradient(numbers[kMaximize] != 0, numbers[kWeightDecay]),
        first(1 - numbers[kBeta1]),
        beta2(static_cast<float>(numbers[kBeta2])),
        eps(static_cast<float>(numbers[kEps])),
        step_size(static_cast<float>(-numbers[kLr] / (1 - pow(numbers[kBeta1], counters[0])))) {}

  template <typename Real>
  Real operator()(Real param, Real grad, Real* states) const {
    grad = gradient.of(param, grad);
    states[0] = first.of(states[0], grad);
    states[1] = larger(magnitude(states[1] * Real(beta2)), magnitude(grad) + Real(eps));
    return param + Real(step_size) * states[0] / states[1];
  }

 private:
  Gradient gradient;
  Lerp first;
  float beta2, eps, step_size;
};

}  // namespace amp_plugin::rules
