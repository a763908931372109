// adam_ on the CPU: Adam and AdamW. Operations follow each other as in torch's fused kernel, for its bits.

#include <cmath>
#include <optional>

#include "cpu_ops.h"
#include "cuda_layout.h"
#include "one_value.h"
#include "step_run.h"
#include "tensor_memory.h"

namespace amp_plugin {
namespace {

using cuda::AdamOptions;

// What one step of a parameter does to an element; float32 numbers, worked out in float64.
template <bool amsgrad>
struct AdamRule {
  static constexpr size_t kStates = amsgrad ? 3 : 2;  // exp_avg, exp_avg_sq, max_exp_avg_sq

  AdamRule(const AdamOptions& options, double step)
      : sign(options.maximize ? -0.0F : 0.0F),
        correction(std::sqrt(1 - std::pow(options.beta2, step))),
        decay(static_cast<float>(options.weight_decay)),
        kept(static_cast<float>(1 - options.lr * options.weight_decay)),
        share(static_cast<float>(1 - options.beta1)),
        beta2(static_cast<float>(options.beta2)),
        square(static_cast<float>(1 - options.beta2)),
        eps(static_cast<float>(options.eps)),
        step_size(static_cast<float>(-options.lr / (1 - std::pow(options.beta1, step)))),
        decays(options.weight_decay != 0 && !options.decoupled),
        shrinks(options.weight_decay != 0 && options.decoupled),
        starts_at_grad(share >= 0.5F),
        seed(seed_of(step)) {
    if (share >= 0.5F) share -= 1;  // the first moment moves from the gradient, as in torch's lerp
  }

  [[gnu::always_inline]] Floats operator()(Floats param, Floats grad, Floats* states) const {
    grad = grad ^ Floats(sign);
    grad = decays.of(at::vec::fmadd(param, Floats(decay), grad), grad);
    param = shrinks.of(param * Floats(kept), param);
    const Floats difference = grad - states[0];
    states[0] = at::vec::fmadd(Floats(share), difference, starts_at_grad.of(grad, states[0]));
    states[1] = at::vec::fmadd(Floats(square) * grad, grad, states[1] * Floats(beta2));
    Floats largest = states[1];
    if constexpr (amsgrad) largest = states[2] = larger(states[2].abs(), states[1].abs());
    const Floats denominator = correction.divide(largest.sqrt()) + Floats(eps);
    return param + Floats(step_size) * states[0] / denominator;
  }

  float sign;
  Divisor correction;
  float decay, kept, share, beta2, square, eps, step_size;
  Choice decays, shrinks, starts_at_grad;
  uint32_t seed;  // of what is rounded at random
};

double incremented(const at::Tensor& step) {
  TORCH_CHECK_VALUE(
      step.device().is_cpu() && step.numel() == 1 &&
          (step.scalar_type() == at::kFloat || step.scalar_type() == at::kDouble),
      "adam_: a step counter is of dtype ", step.scalar_type(), " and shape ", step.sizes(), " on ",
      step.device(), "; it must be one float32 or float64 on the CPU.");
  if (step.scalar_type() == at::kFloat) return *step.mutable_data_ptr<float>() += 1;
  return *step.mutable_data_ptr<double>() += 1;
}

template <bool amsgrad>
std::vector<AdamRule<amsgrad>> rules_of(at::TensorList steps, const AdamOptions& options) {
  std::vector<AdamRule<amsgrad>> rules;
  rules.reserve(steps.size());
  double last = 0;  // parameters mostly have taken as many steps
  for (const at::Tensor& counter : steps) {
    const double step = incremented(counter);
    if (step == last) {
      rules.push_back(rules.back());
    } else {
      rules.emplace_back(options, step);
    }
    last = step;
  }
  increment_versions(steps);
  return rules;
}

}  // namespace

void adam_(
    at::TensorList params, at::TensorList grads, at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
    at::TensorList max_exp_avg_sqs, at::TensorList steps, at::TensorList remainders, double lr, double beta1,
    double beta2, double eps, double weight_decay, bool decoupled_weight_decay, bool maximize,
    const std::optional<at::Tensor>& lr_tensor, const std::optional<at::Tensor>& grad_scale,
    const std::optional<at::Tensor>& found_inf) {
  const Divisor divisor(grad_scale ? one_value(*grad_scale, "grad_scale") : 1.0);
  const StepTensors tensors{params, grads, remainders, {exp_avgs, exp_avg_sqs, max_exp_avg_sqs}};
  const StepRows rows(tensors, "adam_", !divisor.is_one());
  TORCH_CHECK_VALUE(
      exp_avgs.size() == params.size() && exp_avg_sqs.size() == params.size() &&
          steps.size() == params.size(),
      "adam_: ", params.size(), " params, ", exp_avgs.size(), " exp_avgs, ", exp_avg_sqs.size(),
      " exp_avg_sqs and ", steps.size(), " steps; give one for each parameter.");
  if (found_inf && one_value(*found_inf, "found_inf") > 0) return divide_gradients(rows, divisor);
  if (lr_tensor) lr = one_value(*lr_tensor, "lr_tensor");
  const AdamOptions options{
      lr, beta1, beta2, eps, weight_decay, decoupled_weight_decay, maximize, !max_exp_avg_sqs.empty(), 0};
  if (max_exp_avg_sqs.empty()) {
    run_rows(rows.rows(), divisor, rules_of<false>(steps, options));
  } else {
    run_rows(rows.rows(), divisor, rules_of<true>(steps, options));
  }
  rows.finish();
}

}  // namespace amp_plugin
