#include "may_keep.h"

#include <c10/core/InferenceMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <unordered_map>

#include "torch_autocast.h"

namespace amp_plugin {
namespace {

std::atomic<RefillTest> refill_test{nullptr};

// The version counter is a tensor's identity: held here, its address cannot come back for another.
struct Answer {
  c10::VariableVersion version;
  bool is_refilled;
};

// A VariableVersion is a pointer that it does not show.
uintptr_t address_of(const c10::VariableVersion& version) {
  static_assert(sizeof(c10::VariableVersion) == sizeof(uintptr_t));
  uintptr_t address;
  std::memcpy(&address, &version, sizeof(address));
  return address;
}

// A tensor's answer never changes, so it is asked for once.
struct Answers {
  std::unordered_map<const c10::TensorImpl*, Answer> known;
  size_t prune_at = 64;

  void prune() {
    if (known.size() < prune_at) return;
    std::erase_if(known, [](const auto& entry) { return entry.second.version.unique(); });
    prune_at = std::max<size_t>(64, 2 * known.size());
  }
};

// Ask the CUDA driver, which is loaded where there are CUDA tensors; without an answer, yes.
bool driver_says_capturing(void* stream) {
  using Query = int (*)(void* stream, int* status);
  static const auto query = [] {
    void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    return reinterpret_cast<Query>(driver == nullptr ? nullptr : dlsym(driver, "cuStreamIsCapturing"));
  }();
  int status = 0;
  return query == nullptr || query(stream, &status) != 0 || status != 0;
}

// A template, since torch before 2.13 has no such method: then the driver is asked.
template <typename Guard>
bool is_recording(const Guard& guard, c10::DeviceType device) {
  const c10::Stream stream = guard.getStream(guard.getDevice());
  if constexpr (requires { guard.isStreamCapturing(stream); }) {
    return guard.isStreamCapturing(stream);
  } else {
    return device != c10::DeviceType::CUDA || driver_says_capturing(guard.getStreamNativeHandle(stream));
  }
}

// True while the device's current stream records a graph, or where that cannot be told.
bool is_capturing(c10::DeviceType device) {
  const c10::impl::DeviceGuardImplInterface* guard =
      c10::impl::device_guard_impl_registry[static_cast<size_t>(device)].load();
  return guard == nullptr || is_recording(*guard, device);
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
