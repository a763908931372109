#include "weights_epoch.h"

#include <ATen/Context.h>
#include <ATen/Tensor.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>
#include <torch/library.h>

#include <atomic>

namespace amp_plugin {
namespace {

std::atomic<uint64_t> epoch{0};
std::atomic<bool> captured{false};

const c10::impl::DeviceGuardImplInterface* guard_of(c10::DeviceType device) {
  return c10::impl::device_guard_impl_registry[static_cast<size_t>(device)].load();
}

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
bool records(const Guard& guard, c10::DeviceType device) {
  const c10::Stream stream = guard.getStream(guard.getDevice());
  if constexpr (requires { guard.isStreamCapturing(stream); }) {
    return guard.isStreamCapturing(stream);
  } else {
    return device != c10::DeviceType::CUDA || driver_says_capturing(guard.getStreamNativeHandle(stream));
  }
}

// Asking for a stream would start CUDA where nothing uses it. The hooks count devices: fake tensors have
// torch register a guard that has one where there is none.
bool cuda_records() {
  const auto* guard = guard_of(c10::DeviceType::CUDA);
  if (guard == nullptr) return false;
  const auto& cuda = at::globalContext().getAcceleratorHooksInterface(c10::DeviceType::CUDA);
  if (cuda.deviceCount() == 0) return false;
  return cuda.hasPrimaryContext(guard->getDevice().index()) && records(*guard, c10::DeviceType::CUDA);
}

}  // namespace

uint64_t weights_epoch() { return epoch.load(std::memory_order_acquire); }

void invalidate_weight_casts() {
  epoch.fetch_add(1, std::memory_order_acq_rel);
  if (!steps_are_captured() && cuda_records()) captured.store(true, std::memory_order_release);
}

bool steps_are_captured() { return captured.load(std::memory_order_acquire); }

bool is_capturing(c10::DeviceType device) {
  const auto* guard = guard_of(device);
  return guard == nullptr || records(*guard, device);
}

// Compilers drop calls without inputs and outputs; one that writes a tensor stays in their graphs.
TORCH_LIBRARY_FRAGMENT(amp_plugin, library) {
  library.def("_invalidate_weight_casts(Tensor(a!) epoch) -> ()", {at::Tag::cudagraph_unsafe});
  library.def("_forget_captured_steps() -> ()", [] { captured.store(false, std::memory_order_release); });
}

TORCH_LIBRARY_IMPL(amp_plugin, CompositeExplicitAutograd, library) {
  library.impl("_invalidate_weight_casts", [](at::Tensor& /*epoch*/) { invalidate_weight_casts(); });
}

}  // namespace amp_plugin
