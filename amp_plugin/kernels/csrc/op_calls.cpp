#include "op_calls.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace amp_plugin::op_calls {
namespace {

// The op of this name, with the signature of the function that calls it.
template <typename Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name, Signature* /*caller*/) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace

Measured norm_check(Tensors grads, const at::Tensor& inv_scale, double p, bool is_scale) {
  static const auto op = find_op("amp_plugin::norm_check", norm_check);
  return op.call(grads, inv_scale, p, is_scale);
}

Measured unscale_(Tensors grads, const at::Tensor& inv_scale, double p, bool is_scale) {
  static const auto op = find_op("amp_plugin::unscale_", unscale_);
  return op.call(grads, inv_scale, p, is_scale);
}

at::Tensor multiply_(Tensors grads, const at::Tensor& factor) {
  static const auto op = find_op("amp_plugin::multiply_", multiply_);
  return op.call(grads, factor);
}

void adam_(
    Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors max_exp_avg_sqs,
    Tensors steps, Tensors remainders, double lr, double beta1, double beta2, double eps, double weight_decay,
    bool decoupled_weight_decay, bool maximize, const OptionalTensor& lr_tensor,
    const OptionalTensor& grad_scale, const OptionalTensor& found_inf) {
  static const auto op = find_op("amp_plugin::adam_", adam_);
  op.call(
      params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, remainders, lr, beta1, beta2, eps,
      weight_decay, decoupled_weight_decay, maximize, lr_tensor, grad_scale, found_inf);
}

void sgd_(
    Tensors params, Tensors grads, Tensors momentum_buffers, Tensors remainders, double lr, double momentum,
    double dampening, double weight_decay, bool nesterov, bool maximize, bool first_step,
    const OptionalTensor& lr_tensor, const OptionalTensor& grad_scale, const OptionalTensor& found_inf) {
  static const auto op = find_op("amp_plugin::sgd_", sgd_);
  op.call(
      params, grads, momentum_buffers, remainders, lr, momentum, dampening, weight_decay, nesterov, maximize,
      first_step, lr_tensor, grad_scale, found_inf);
}

bool nobody_watches() {
  const c10::DispatchKeySet included = c10::impl::tls_local_dispatch_key_set().included_;
  return (included - c10::default_included_set).empty() &&
      !at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION).has_value();
}

}  // namespace amp_plugin::op_calls
