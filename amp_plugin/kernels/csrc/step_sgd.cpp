// sgd_ on the CPU: SGD with momentum. Operations follow each other as in torch's fused kernel, for its bits.

#include <optional>

#include "cpu_ops.h"
#include "cuda_layout.h"
#include "one_value.h"
#include "step_run.h"

namespace amp_plugin {
namespace {

using cuda::SgdOptions;

// What one step does to an element; float32 numbers, worked out in float64.
template <bool has_momentum>
struct SgdRule {
  static constexpr size_t kStates = has_momentum ? 1 : 0;  // momentum_buffer
  static constexpr uint32_t seed = 0;  // nothing is rounded at random

  explicit SgdRule(const SgdOptions& options)
      : sign(options.maximize ? -0.0F : 0.0F),
        decay(static_cast<float>(options.weight_decay)),
        momentum(static_cast<float>(options.momentum)),
        damped(static_cast<float>(1 - options.dampening)),
        step_size(static_cast<float>(-options.lr)),
        decays(options.weight_decay != 0),
        nesterov(options.nesterov),
        starts(options.first_step) {}

  [[gnu::always_inline]] Floats operator()(Floats param, Floats grad, Floats* states) const {
    grad = grad ^ Floats(sign);
    grad = decays.of(at::vec::fmadd(param, Floats(decay), grad), grad);
    if constexpr (has_momentum) {
      Floats& buffer = states[0];
      buffer = starts.of(grad, at::vec::fmadd(Floats(damped), grad, buffer * Floats(momentum)));
      grad = nesterov.of(at::vec::fmadd(buffer, Floats(momentum), grad), buffer);
    }
    return at::vec::fmadd(grad, Floats(step_size), param);
  }

  float sign, decay, momentum, damped, step_size;
  Choice decays, nesterov, starts;
};

}  // namespace

void sgd_(
    at::TensorList params, at::TensorList grads, at::TensorList momentum_buffers, at::TensorList remainders,
    double lr, double momentum, double dampening, double weight_decay, bool nesterov, bool maximize,
    bool first_step, const std::optional<at::Tensor>& lr_tensor, const std::optional<at::Tensor>& grad_scale,
    const std::optional<at::Tensor>& found_inf) {
  const Divisor divisor(grad_scale ? one_value(*grad_scale, "grad_scale") : 1.0);
  const StepTensors tensors{params, grads, remainders, {momentum_buffers}};
  const StepRows rows(tensors, "sgd_", !divisor.is_one());
  TORCH_CHECK_VALUE(
      momentum == 0 || momentum_buffers.size() == params.size(), "sgd_: momentum ", momentum, " with ",
      momentum_buffers.size(), " momentum_buffers for ", params.size(),
      " params; give one for each parameter.");
  if (found_inf && one_value(*found_inf, "found_inf") > 0) return divide_gradients(rows, divisor);
  if (lr_tensor) lr = one_value(*lr_tensor, "lr_tensor");
  const SgdOptions options{lr, momentum, dampening, weight_decay, nesterov, maximize, first_step, 0};
  if (momentum == 0) {
    run_rows(rows.rows(), divisor, std::vector(params.size(), SgdRule<false>(options)));
  } else {
    run_rows(rows.rows(), divisor, std::vector(params.size(), SgdRule<true>(options)));
  }
  rows.finish();
}

}  // namespace amp_plugin
