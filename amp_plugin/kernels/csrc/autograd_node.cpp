#include "autograd_node.h"

#include <ATen/core/VariableHooksInterface.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_to_copy_ops.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <atomic>
#include <cstddef>
#include <memory>

// As in <torch/csrc/autograd/variable.h>. Autograd's headers include those of half of torch: a fifth of the
// library's compile time.
namespace torch::autograd {
struct PostAccumulateGradHook;
namespace impl {
TORCH_API std::unique_ptr<PostAccumulateGradHook>& post_acc_grad_hooks(const at::Tensor& tensor);
}
}  // namespace torch::autograd

namespace amp_plugin {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

// Below autograd, and without kernels of its own: only a call that names it comes to the kernel below.
constexpr DispatchKey kMadeAlready = DispatchKey::CustomRNGKeyId;

thread_local at::Tensor made;

// Stands in for the computation of a cast whose result is there.
at::Tensor take_made(
    const at::Tensor& /*self*/, std::optional<at::ScalarType> /*dtype*/, std::optional<at::Layout> /*layout*/,
    std::optional<at::Device> /*device*/, std::optional<bool> /*pin_memory*/, bool /*non_blocking*/,
    std::optional<at::MemoryFormat> /*memory_format*/) {
  return std::move(made);
}

void prefetch(const void* object, size_t offset) {
  __builtin_prefetch(static_cast<const char*>(object) + offset);
}

// Where autograd's part of a tensor holds the gradient: every one is of the same class or derived from it.
ptrdiff_t offset_of_gradient(const c10::AutogradMetaInterface& known) {
  return reinterpret_cast<const char*>(&known.grad()) - reinterpret_cast<const char*>(&known);
}

}  // namespace

// Without the virtual call behind Tensor::grad(), which reads another cache line.
void find_gradients(const c10::TensorImpl* const* tensors, size_t count, const at::Tensor** gradients) {
  static const at::Tensor nothing;
  static std::atomic<ptrdiff_t> offset{0};  // 0 until the first tensor that autograd knows
  constexpr size_t kSize = sizeof(c10::TensorImpl);
  for (size_t i = 0; i < count; ++i) {
    const c10::AutogradMetaInterface* known = tensors[i]->autograd_meta();
    gradients[i] = &nothing;
    if (known == nullptr) continue;
    ptrdiff_t at = offset.load(std::memory_order_relaxed);
    if (at == 0) offset.store(at = offset_of_gradient(*known), std::memory_order_relaxed);
    gradients[i] = reinterpret_cast<const at::Tensor*>(reinterpret_cast<const char*>(known) + at);
    __builtin_prefetch(gradients[i]);
  }
  for (size_t i = 0; i < count; ++i) {
    const c10::TensorImpl* gradient = gradients[i]->unsafeGetTensorImpl();
    prefetch(gradient, 16);  // storage
    prefetch(gradient, kSize - 32);  // size, dtype, device
    prefetch(gradient, kSize - 1);
  }
}

// Torch's own kernel makes the node, as for any cast; what it calls below itself is the kernel above.
at::Tensor attached_cast(const at::Tensor& buffer, const at::Tensor& weight) {
  const DispatchKey autograd = c10::getAutogradKeyFromBackend(weight.key_set().highestBackendKey());
  made = at::Tensor(buffer.variable_data());
  return at::_ops::_to_copy::redispatch(
      DispatchKeySet({autograd, kMadeAlready}), weight, buffer.scalar_type(), std::nullopt, std::nullopt,
      std::nullopt, false, std::nullopt);
}

bool has_post_accumulate_hooks(const at::Tensor& param) {
  const bool is_known = param.unsafeGetTensorImpl()->autograd_meta() != nullptr;
  return is_known && torch::autograd::impl::post_acc_grad_hooks(param) != nullptr;
}

}  // namespace amp_plugin

TORCH_LIBRARY_IMPL(aten, CustomRNGKeyId, library) { library.impl("_to_copy", amp_plugin::take_made); }
