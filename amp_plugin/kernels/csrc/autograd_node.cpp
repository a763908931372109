#include "autograd_node.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/variable.h>

namespace amp_plugin {
namespace {

// torch's own backward of a cast.
using CastBackward = torch::autograd::generated::ToCopyBackward0;

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
  at::Tensor cast = buffer.variable_data();
  auto node = make_node<CastBackward>();
  node->self_options = weight.options();
  node->set_next_edges(torch::autograd::collect_next_edges(weight));
  torch::autograd::set_history(cast, node);
  return cast;
}

bool has_post_accumulate_hooks(const at::Tensor& param) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(param);
  return meta != nullptr && meta->post_acc_grad_hooks_ != nullptr;
}

}  // namespace amp_plugin
