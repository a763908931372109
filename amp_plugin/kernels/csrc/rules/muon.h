// The elementwise parts of Muon (Jordan, 2024), before and after its matrix products, as in torch.optim.Muon.
#pragma once

#include "rule.h"

namespace amp_plugin::rules {

// Before the products: updates the momentum, and writes the input of the products in place of the parameter.
struct MuonMomentum : Uncounted {
  enum Numbers { kLr, kMomentum, kNesterov, kNumbers };
  using States = StateList<kSigned>;  // momentum_buffer

  MuonMomentum(const double* numbers, const double*)
      : average(1 - numbers[kMomentum]), look_ahead(numbers[kMomentum]), nesterov(numbers[kNesterov] != 0) {}

  template <typename Real>
  Real operator()(Real, Real grad, Real* states) const {
    states[0] = average.of(states[0], grad);
    return nesterov.of(look_ahead.of(grad, states[0]), states[0]);
  }

 private:
  Lerp average, look_ahead;
  Choice nesterov;
};

// After the products: takes their results in place of gradients, and updates the parameters.
struct MuonUpdate : Uncounted {
  // kRatio: the parameter's learning rate divided by kLr
  enum Numbers { kLr, kWeightDecay, kRatio, kNumbers };
  using States = StateList<>;

  MuonUpdate(const double* numbers, const double*)
      : kept(static_cast<float>(1 - numbers[kLr] * numbers[kWeightDecay])),
        step_size(static_cast<float>(-(numbers[kLr] * numbers[kRatio]))) {}

  template <typename Real>
  Real operator()(Real param, Real update, Real*) const {
    return multiply_add(update, Real(step_size), param * Real(kept));
  }

 private:
  float kept, step_size;
};

}  // namespace amp_plugin::rules
