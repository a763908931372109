#include "autograd_node.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_to_copy_ops.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include "new_tensor.h"

// As in <torch/csrc/autograd/generated/Functions.h>, which includes the headers of all ops. The rest of its
// virtual functions are found in torch's own table.
namespace torch::autograd::generated {
struct TORCH_API ToCopyBackward0 : public TraceableFunction {
  using TraceableFunction::TraceableFunction;
  variable_list apply(variable_list&& grads) override;
  at::TensorOptions self_options;
};
}  // namespace torch::autograd::generated

namespace amp_plugin {
namespace {

// torch's own backward of a cast.
using CastBackward = torch::autograd::generated::ToCopyBackward0;

// Whether a node that torch makes holds its options where the declaration above has them.
bool is_as_declared() {
  const c10::AutoGradMode with_grad(true);
  const at::Tensor leaf = new_tensor({0}, at::kDouble).requires_grad_();
  const at::Tensor cast = at::_ops::_to_copy::call(
      leaf, at::kFloat, std::nullopt, std::nullopt, std::nullopt, false, std::nullopt);
  const auto* node = dynamic_cast<const CastBackward*>(cast.grad_fn().get());
  if (node == nullptr) return false;
  const at::TensorOptions& options = node->self_options;
  return options.dtype() == leaf.dtype() && options.device() == leaf.device() && options.has_layout() &&
      options.layout() == at::kStrided && !options.pinned_memory_opt().value_or(false);
}

// torch counts references to nodes inside them since 2.12, before in a shared_ptr.
template <typename Node>
auto make_node() {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, Node>) {
    return c10::make_intrusive<Node>();
  } else {
    return std::make_shared<Node>();
  }
}

void prefetch(const void* object, size_t offset) {
  __builtin_prefetch(static_cast<const char*>(object) + offset);
}

}  // namespace

// Without the virtual call behind Tensor::grad(), which reads another cache line.
void find_gradients(const c10::TensorImpl* const* tensors, size_t count, const at::Tensor** gradients) {
  using torch::autograd::AutogradMeta;
  static const at::Tensor nothing;
  constexpr size_t kSize = sizeof(c10::TensorImpl);
  for (size_t i = 0; i < count; ++i) {
    const auto* known = static_cast<const AutogradMeta*>(tensors[i]->autograd_meta());
    gradients[i] = known == nullptr ? &nothing : &known->grad_;
    __builtin_prefetch(gradients[i]);
  }
  for (size_t i = 0; i < count; ++i) {
    const c10::TensorImpl* gradient = gradients[i]->unsafeGetTensorImpl();
    prefetch(gradient, 16);  // storage
    prefetch(gradient, kSize - 32);  // size, dtype, device
    prefetch(gradient, kSize - 1);
  }
}

at::Tensor attached_cast(const at::Tensor& buffer, const at::Tensor& weight) {
  static const bool is_known = is_as_declared();
  TORCH_CHECK(
      is_known, "amp_plugin: this torch keeps the backward of a cast in an unknown layout; use one of torch ",
      "2.11 to 2.15, or regions without a CastCache.");
  at::Tensor cast = buffer.variable_data();
  auto node = make_node<CastBackward>();
  node->self_options = weight.options();
  node->set_next_edges({torch::autograd::impl::gradient_edge(weight)});
  const uint32_t output = node->add_input_metadata(cast);
  torch::autograd::impl::set_gradient_edge(cast, {std::move(node), output});
  return cast;
}

bool has_post_accumulate_hooks(const at::Tensor& param) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(param);
  return meta != nullptr && meta->post_acc_grad_hooks_ != nullptr;
}

}  // namespace amp_plugin
