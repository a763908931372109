#include "region_casts.h"

#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/DimVector.h>
#include <c10/util/SmallVector.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "torch_autocast.h"

namespace amp_plugin {
namespace {

std::atomic<RefillTest> refill_test{nullptr};

// The answer of the refill test for a tensor. The tensor is identified by its version counter. Because we
// hold the counter, its address cannot be reused for the counter of another tensor.
struct Answer {
  c10::VariableVersion version;
  bool is_refilled;
};

// A VariableVersion holds one pointer, which it does not expose.
uintptr_t address_of(const c10::VariableVersion& version) {
  static_assert(sizeof(c10::VariableVersion) == sizeof(uintptr_t));
  uintptr_t address;
  std::memcpy(&address, &version, sizeof(address));
  return address;
}

// The answers so far. The test is called once per tensor, because its answer never changes.
struct Answers {
  std::unordered_map<const c10::TensorImpl*, Answer> known;
  size_t prune_at = 64;

  void prune() {
    if (known.size() < prune_at) return;
    std::erase_if(known, [](const auto& entry) { return entry.second.version.unique(); });
    prune_at = std::max<size_t>(64, 2 * known.size());
  }
};

// Asks the CUDA driver whether the stream is being captured. libcuda is already loaded if there are CUDA
// tensors. Returns true if the driver cannot be asked.
bool driver_says_capturing(void* stream) {
  using Query = int (*)(void* stream, int* status);
  static const auto query = [] {
    void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    return reinterpret_cast<Query>(driver == nullptr ? nullptr : dlsym(driver, "cuStreamIsCapturing"));
  }();
  int status = 0;
  return query == nullptr || query(stream, &status) != 0 || status != 0;
}

// A template, because torch before 2.13 does not have isStreamCapturing(). The driver is asked instead.
template <typename Guard>
bool is_recording(const Guard& guard, c10::DeviceType device) {
  const c10::Stream stream = guard.getStream(guard.getDevice());
  if constexpr (requires { guard.isStreamCapturing(stream); }) {
    return guard.isStreamCapturing(stream);
  } else {
    return device != c10::DeviceType::CUDA || driver_says_capturing(guard.getStreamNativeHandle(stream));
  }
}

// Return true while the device's current stream is being captured, and if that is unknown.
bool is_capturing(c10::DeviceType device) {
  const c10::impl::DeviceGuardImplInterface* guard =
      c10::impl::device_guard_impl_registry[static_cast<size_t>(device)].load();
  return guard == nullptr || is_recording(*guard, device);
}

// Return true while a torch mode is on that makes fake tensors or records ops.
bool is_recorded_by_a_mode() {
  using Modes = c10::impl::TorchDispatchModeTLS;
  using Key = c10::impl::TorchDispatchModeKey;
  if (!Modes::any_modes_set()) return false;
  return Modes::get_mode(Key::FAKE).has_value() || Modes::get_mode(Key::PROXY).has_value() ||
      Modes::get_mode(Key::FUNCTIONAL).has_value();
}

// The number of times that all casts were forgotten. A cast is valid only if this number was the same when it
// was made.
std::atomic<uint64_t> forgotten{0};

// A number that identifies the device's current stream.
int64_t stream_number(c10::Device device) {
  if (device.is_cpu()) return 0;
  return static_cast<int64_t>(c10::impl::VirtualGuardImpl(device.type()).getStream(device).id());
}

uint32_t version_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

// A cast, with the memory and the version of the weight that it was made from. It holds no reference to the
// weight, because torch.utils.swap_tensors refuses to swap a tensor that has other references.
class KeptCast {
 public:
  KeptCast(const at::Tensor& weight, at::Tensor cast)
      : cast_(std::move(cast)),
        stream_(stream_number(weight.device())),
        forgotten_(forgotten.load(std::memory_order_acquire)),
        version_(version_of(weight)),
        storage_(weight.storage().getWeakStorageImpl()),
        offset_(weight.storage_offset()),
        sizes_(weight.sizes()),
        strides_(weight.strides()) {}

  const at::Tensor& cast() const { return cast_; }

  // False on another stream: that stream may run before the cast has been computed on its own stream.
  bool is_of(const at::Tensor& weight, c10::ScalarType dtype) const {
    return cast_.scalar_type() == dtype && stream_ == stream_number(weight.device());
  }

  bool is_current(const at::Tensor& weight) const {
    return version_ == version_of(weight) && forgotten_ == forgotten.load(std::memory_order_acquire) &&
        shares_storage(weight) && offset_ == weight.storage_offset() &&
        weight.sizes() == c10::IntArrayRef(sizes_) && weight.strides() == c10::IntArrayRef(strides_);
  }

  bool shares_storage(const at::Tensor& tensor) const {
    return storage_._unsafe_get_target() == tensor.storage().unsafeGetStorageImpl();
  }

 private:
  at::Tensor cast_;
  int64_t stream_;
  uint64_t forgotten_;
  uint32_t version_;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
  int64_t offset_;
  c10::DimVector sizes_;
  c10::DimVector strides_;
};

// The casts by the address of their weight. The address is not reused, because the autograd graph of the cast
// keeps the weight alive.
using CastsByWeight = std::unordered_map<const c10::TensorImpl*, c10::SmallVector<KeptCast, 1>>;

// Notices torch.clear_autocast_cache(), which must forget our casts too. Torch does not announce that call.
// But torch's cache holds a weak reference to each leaf tensor whose cast it keeps, and drops the reference
// when it is cleared. So we put the cast of one leaf of our own into that cache, for all threads, and count
// the weak references to the leaf.
class TorchCacheWatch {
 public:
  // Never destroyed: threads may still run at exit.
  static TorchCacheWatch& get() {
    static auto* watch = new TorchCacheWatch;
    return *watch;
  }

  bool was_cleared() const { return leaf_.weak_use_count() <= 1; }

  // Puts the cast of the leaf into torch's cache. If the cache was cleared since the last time, the kept
  // casts of all threads are forgotten.
  void start() {
    const std::lock_guard lock(mutex_);
    if (!was_cleared()) return;
    forget_all_casts();
    const c10::impl::ExcludeDispatchKeyGuard unseen(seen_by_others);
    const at::DisableRecordFunctionGuard no_profiler;
    const c10::AutoGradMode no_grad(false);
    const bool was_enabled = at::autocast::is_autocast_cache_enabled();
    at::autocast::set_autocast_cache_enabled(true);
    at::autocast::cached_cast(at::autocast::get_autocast_dtype(at::kCPU), leaf_, at::kCPU);
    at::autocast::set_autocast_cache_enabled(was_enabled);
  }

 private:
  static constexpr c10::DispatchKeySet seen_by_others{
      c10::DispatchKey::Python,
      c10::DispatchKey::PythonTLSSnapshot,
      c10::DispatchKey::PreDispatch,
      c10::DispatchKey::PythonDispatcher,
  };

  static at::Tensor made_leaf() {
    const c10::impl::ExcludeDispatchKeyGuard unseen(seen_by_others);
    const c10::InferenceMode no_inference(false);
    return at::empty({1}, at::kFloat).zero_().requires_grad_();
  }

  const at::Tensor leaf_ = made_leaf();
  std::mutex mutex_;
};

CastsByWeight& casts_of_thread() {
  thread_local CastsByWeight casts;
  if (!casts.empty() && TorchCacheWatch::get().was_cleared()) casts.clear();
  return casts;
}

}  // namespace

void set_refill_test(RefillTest test) { refill_test.store(test, std::memory_order_release); }

bool is_refilled(const at::Tensor& tensor) {
  const RefillTest test = refill_test.load(std::memory_order_acquire);
  if (test == nullptr) return false;
  thread_local Answers answers;
  const auto* impl = tensor.unsafeGetTensorImpl();
  const auto& version = impl->version_counter();
  const auto known = answers.known.find(impl);
  if (known != answers.known.end() && address_of(known->second.version) == address_of(version)) {
    return known->second.is_refilled;
  }
  const bool answer = test(tensor);
  answers.prune();
  answers.known.insert_or_assign(impl, Answer{.version = version, .is_refilled = answer});
  return answer;
}

bool may_keep(c10::DeviceType device) {
  const auto included = c10::impl::tls_local_dispatch_key_set().included_;
  return !(
      included.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
      included.has(c10::DispatchKey::Tracer) || included.has(c10::DispatchKey::Functionalize) ||
      c10::InferenceMode::is_enabled() || is_recorded_by_a_mode() ||
      (device != c10::DeviceType::CPU && is_capturing(device)));
}

bool is_weight(const at::Tensor& tensor) {
  return tensor.scalar_type() == c10::kFloat && tensor.requires_grad() && tensor.is_leaf() &&
      !tensor.is_view() && tensor.layout() == c10::kStrided && !tensor.is_nested() && tensor.has_storage() &&
      !tensor.is_inference() && !at::caching::is_cached_tensor(tensor);
}

at::Tensor find_cast(const at::Tensor& weight, c10::ScalarType dtype) {
  auto& casts = casts_of_thread();
  const auto found = casts.find(weight.unsafeGetTensorImpl());
  if (found == casts.end()) return {};
  for (const auto& kept : found->second) {
    if (kept.is_of(weight, dtype) && kept.is_current(weight)) return kept.cast();
  }
  return {};
}

void keep_cast(const at::Tensor& weight, const at::Tensor& cast) {
  if (TorchCacheWatch::get().was_cleared()) TorchCacheWatch::get().start();
  auto& entries = casts_of_thread()[weight.unsafeGetTensorImpl()];
  const auto replaced = [&](const KeptCast& kept) {
    return kept.is_of(weight, cast.scalar_type()) || !kept.is_current(weight);
  };
  entries.erase(std::remove_if(entries.begin(), entries.end(), replaced), entries.end());
  entries.emplace_back(weight, cast);
}

void forget_all_casts() { forgotten.fetch_add(1, std::memory_order_acq_rel); }

void clear_region_casts() {
  auto& casts = casts_of_thread();
  if (!casts.empty()) casts.clear();
}

int64_t kept_cast_count() {
  int64_t count = 0;
  for (const auto& [weight, entries] : casts_of_thread()) count += static_cast<int64_t>(entries.size());
  return count;
}

}  // namespace amp_plugin
