#include "may_keep.h"

#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <algorithm>
#include <atomic>
#include <unordered_map>

#include "cast_source.h"
#include "torch_autocast.h"
#include "weights_epoch.h"

namespace amp_plugin {
namespace {

std::atomic<LifetimeTest> lifetime_test{nullptr};

struct Answer {
  VersionOf tensor;
  Lifetime lifetime;
};

// A tensor's answer never changes, so it is asked for once.
struct Answers {
  std::unordered_map<const c10::TensorImpl*, Answer> known;
  size_t prune_at = 64;

  void prune() {
    if (known.size() < prune_at) return;
    std::erase_if(known, [](const auto& entry) { return entry.second.tensor.is_orphan(); });
    prune_at = std::max<size_t>(64, 2 * known.size());
  }
};

}  // namespace

void set_lifetime_test(LifetimeTest test) { lifetime_test.store(test, std::memory_order_release); }

Lifetime lifetime_of_casts(const at::Tensor& tensor) {
  const LifetimeTest test = lifetime_test.load(std::memory_order_acquire);
  if (test == nullptr) return Lifetime::kRegion;
  thread_local Answers answers;
  const auto* impl = tensor.unsafeGetTensorImpl();
  const auto known = answers.known.find(impl);
  if (known != answers.known.end() && known->second.tensor.is_of(tensor)) return known->second.lifetime;
  const Lifetime lifetime = test(tensor);
  answers.prune();
  answers.known.insert_or_assign(impl, Answer{.tensor = VersionOf(tensor), .lifetime = lifetime});
  return lifetime;
}

bool may_keep(c10::DeviceType device) {
  const auto included = c10::impl::tls_local_dispatch_key_set().included_;
  return !(
      included.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
      included.has(c10::DispatchKey::Tracer) || included.has(c10::DispatchKey::Functionalize) ||
      c10::InferenceMode::is_enabled() || c10::impl::TorchDispatchModeTLS::any_modes_set() ||
      (device != c10::DeviceType::CPU && is_capturing(device)));
}

bool is_weight(const at::Tensor& tensor) {
  return tensor.scalar_type() == c10::kFloat && tensor.requires_grad() && tensor.is_leaf() &&
      !tensor.is_view() && tensor.layout() == c10::kStrided && !tensor.is_nested() && tensor.has_storage() &&
      !tensor.is_inference() && !tensor.key_set().has(c10::DispatchKey::Python) &&
      !at::caching::is_cached_tensor(tensor);
}

}  // namespace amp_plugin
