#include "weight_cache.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/SmallVector.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <unordered_map>

namespace at::caching {
TORCH_API bool is_cached_tensor(const at::Tensor& t);
}

namespace amp_plugin {
namespace {

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

// An address alone is no identity: it comes back after a swap. Weak pointers keep it from being reused.
struct KeptCast {
  WeakTensor weight;
  WeakStorage storage;
  int64_t offset;
  uint32_t version;
  uint64_t epoch;
  at::Tensor cast;
};

// A cast has its weight's sizes and strides, unless the weight has gaps; then it is never found again.
bool is_current(const KeptCast& kept, const at::Tensor& weight) {
  const auto* impl = weight.unsafeGetTensorImpl();
  return kept.weight._unsafe_get_target() == impl &&
      kept.storage._unsafe_get_target() == weight.storage().unsafeGetStorageImpl() &&
      kept.offset == weight.storage_offset() && kept.version == impl->version_counter().current_version() &&
      kept.epoch == weights_epoch() && kept.cast.sizes() == weight.sizes() &&
      kept.cast.strides() == weight.strides();
}

using KeptCasts = std::unordered_map<const c10::TensorImpl*, c10::SmallVector<KeptCast, 1>>;

KeptCasts& kept_casts() {
  thread_local KeptCasts casts;
  return casts;
}

std::atomic<uint64_t> epoch{0};
std::atomic<ManagedTest> managed_test{nullptr};

// Asks the CUDA driver, which is loaded where there are CUDA tensors; without an answer, yes.
bool driver_says_capturing(void* stream) {
  using Query = int (*)(void* stream, int* status);
  static const auto query = [] {
    void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    return reinterpret_cast<Query>(driver == nullptr ? nullptr : dlsym(driver, "cuStreamIsCapturing"));
  }();
  int status = 0;
  return query == nullptr || query(stream, &status) != 0 || status != 0;
}

// Asked through a template: torch before 2.13 has no such method, and then the driver is asked.
template <typename Guard>
bool is_capturing(const Guard& guard, c10::DeviceType device) {
  const c10::Stream stream = guard.getStream(guard.getDevice());
  if constexpr (requires { guard.isStreamCapturing(stream); }) {
    return guard.isStreamCapturing(stream);
  } else {
    return device != c10::DeviceType::CUDA || driver_says_capturing(guard.getStreamNativeHandle(stream));
  }
}

}  // namespace

void set_managed_test(ManagedTest test) { managed_test.store(test, std::memory_order_release); }

bool may_cache(c10::DeviceType device) {
  const auto included = c10::impl::tls_local_dispatch_key_set().included_;
  if (included.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
      included.has(c10::DispatchKey::Tracer) || included.has(c10::DispatchKey::Functionalize) ||
      c10::InferenceMode::is_enabled() || c10::impl::TorchDispatchModeTLS::any_modes_set()) {
    return false;
  }
  if (device == c10::DeviceType::CPU) return true;
  const auto* guard = c10::impl::device_guard_impl_registry[static_cast<size_t>(device)].load();
  return guard != nullptr && !is_capturing(*guard, device);
}

// A tensor's answer never changes, so it is asked for once.
bool is_managed(const at::Tensor& tensor) {
  const ManagedTest test = managed_test.load(std::memory_order_acquire);
  if (test == nullptr) return false;
  thread_local std::unordered_map<const c10::TensorImpl*, std::pair<WeakTensor, bool>> answers;
  const auto* impl = tensor.unsafeGetTensorImpl();
  const auto known = answers.find(impl);
  if (known != answers.end() && known->second.first._unsafe_get_target() == impl &&
      !known->second.first.expired()) {
    return known->second.second;
  }
  if (answers.size() > 65536) answers.clear();
  const bool managed = test(tensor);
  answers.insert_or_assign(impl, std::pair(WeakTensor(tensor.getIntrusivePtr()), managed));
  return managed;
}

bool is_cacheable_weight(const at::Tensor& tensor) {
  return tensor.scalar_type() == c10::kFloat && tensor.requires_grad() && tensor.is_leaf() &&
      !tensor.is_view() && tensor.layout() == c10::kStrided && !tensor.is_nested() && tensor.has_storage() &&
      !tensor.is_inference() && !tensor.key_set().has(c10::DispatchKey::Python) &&
      !at::caching::is_cached_tensor(tensor) && !is_managed(tensor);
}

at::Tensor find_cast(const at::Tensor& weight, c10::ScalarType dtype) {
  auto& casts = kept_casts();
  const auto found = casts.find(weight.unsafeGetTensorImpl());
  if (found == casts.end()) return {};
  for (const auto& kept : found->second) {
    if (kept.cast.scalar_type() == dtype && is_current(kept, weight)) return kept.cast;
  }
  return {};
}

void keep_cast(const at::Tensor& weight, const at::Tensor& cast) {
  auto& entries = kept_casts()[weight.unsafeGetTensorImpl()];
  const auto replaced = [&](const KeptCast& kept) {
    return kept.cast.scalar_type() == cast.scalar_type() || !is_current(kept, weight);
  };
  entries.erase(std::remove_if(entries.begin(), entries.end(), replaced), entries.end());
  entries.push_back(
      KeptCast{
          .weight = WeakTensor(weight.getIntrusivePtr()),
          .storage = weight.storage().getWeakStorageImpl(),
          .offset = weight.storage_offset(),
          .version = weight.unsafeGetTensorImpl()->version_counter().current_version(),
          .epoch = weights_epoch(),
          .cast = cast,
      });
}

void clear_weight_cache() {
  auto& casts = kept_casts();
  if (!casts.empty()) casts.clear();
}

void forget_casts_of_storage(const at::Tensor& tensor) {
  auto& casts = kept_casts();
  if (casts.empty() || !tensor.has_storage()) return;
  const auto* storage = tensor.storage().unsafeGetStorageImpl();
  for (auto each = casts.begin(); each != casts.end();) {
    auto& entries = each->second;
    const auto shares = [&](const KeptCast& kept) { return kept.storage._unsafe_get_target() == storage; };
    entries.erase(std::remove_if(entries.begin(), entries.end(), shares), entries.end());
    each = entries.empty() ? casts.erase(each) : std::next(each);
  }
}

void invalidate_weight_casts() { epoch.fetch_add(1, std::memory_order_acq_rel); }

uint64_t weights_epoch() { return epoch.load(std::memory_order_acquire); }

int64_t kept_cast_count() {
  int64_t count = 0;
  for (const auto& [impl, entries] : kept_casts()) count += static_cast<int64_t>(entries.size());
  return count;
}

}  // namespace amp_plugin
