#include "autograd_node.h"

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

bool has_post_accumulate_hooks(const at::Tensor& param) {
  const bool is_known = param.unsafeGetTensorImpl()->autograd_meta() != nullptr;
  return is_known && torch::autograd::impl::post_acc_grad_hooks(param) != nullptr;
}

}  // namespace amp_plugin
