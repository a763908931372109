#include "cuda_device.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <string_view>

namespace amp_plugin::cuda {
namespace {

constexpr size_t kMostDevices = 64;
enum class Server : uint8_t { kUnknown, kKernels, kPlainTorch };

std::array<std::atomic<Device*>, kMostDevices> devices{};
std::array<std::atomic<Server>, kMostDevices> servers{};

const c10::impl::DeviceGuardImplInterface& guard() { return *c10::impl::getDeviceGuardImpl(c10::kCUDA); }

// Compiled by Python: machine code as uint8. No lock of ours may be held, since Python takes its own.
at::Tensor compiled(c10::DeviceIndex index, const Kernel& kernel) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("amp_plugin::_cuda_compile", "")
                             .typed<at::Tensor(int64_t, c10::string_view, c10::string_view)>();
  return op.call(index, kernel.name, kernel.norm);
}

}  // namespace

InContext::InContext(Handle context) {
  check(driver().cuCtxGetCurrent(&before_), "the CUDA driver tells no context");
  if (before_ == context) return;
  check(driver().cuCtxSetCurrent(context), "the CUDA driver takes no context");
  changed_ = true;
}

InContext::~InContext() {
  if (changed_) driver().cuCtxSetCurrent(before_);
}

Device* Device::find(c10::DeviceIndex index) {
  auto& server = servers.at(static_cast<size_t>(index));
  if (server.load(std::memory_order_acquire) == Server::kUnknown) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("amp_plugin::_cuda_prepare", "")
                               .typed<bool(int64_t)>();
    const bool serves = op.call(index);
    server.store(serves ? Server::kKernels : Server::kPlainTorch, std::memory_order_release);
  }
  return server.load(std::memory_order_acquire) == Server::kKernels ? devices[index].load() : nullptr;
}

Device& Device::open(c10::DeviceIndex index, uint32_t multiprocessors) {
  auto& place = devices.at(static_cast<size_t>(index));
  if (place.load() == nullptr) {
    auto* made = new Device(index, multiprocessors);  // stays until the process ends
    Device* nothing = nullptr;
    if (!place.compare_exchange_strong(nothing, made)) delete made;
  }
  return *place.load();
}

Device::Device(c10::DeviceIndex index, uint32_t multiprocessors)
    : index_(index),
      most_blocks_(multiprocessors * kBlocksPerMultiprocessor),
      tables_({c10::kCUDA, index}, most_blocks_) {
  check(driver().cuDevicePrimaryCtxRetain(&context_, index), "the CUDA driver has no context for the device");
}

Handle Device::stream() const { return guard().getStreamNativeHandle(guard().getStream(device())); }

bool Device::is_captured(Handle stream) {
  int status = 0;
  check(driver().cuStreamIsCapturing(stream, &status), "the CUDA driver tells nothing of the stream");
  return status != 0;
}

Table Device::table(const Rows& rows, Handle stream) {
  const InContext context(context_);
  return tables_.of(rows, stream, is_captured(stream));
}

Table Device::table(at::TensorList tensors, Handle stream) {
  if (!tensors.empty()) {
    const std::optional<KeptTable> kept = kept_table(tensors.size(), tensors[0], stream);
    if (kept && are_of(kept->rows->data(), tensors, device())) return kept->table;
  }
  return table(rows_of(tensors, {}, device()), stream);
}

std::optional<KeptTable> Device::kept_table(size_t count, const at::Tensor& first, Handle stream) {
  if (count == 0) return std::nullopt;
  const InContext context(context_);
  return is_captured(stream) ? std::nullopt : tables_.kept(count, first, stream);
}

Handle Device::function(size_t kernel) {
  const Handle loaded = functions_[kernel].load(std::memory_order_acquire);
  return loaded != nullptr ? loaded : load(kernel);
}

Handle Device::load(size_t kernel) {
  const at::Tensor code = compiled(index_, kKernels[kernel]);
  const std::lock_guard lock(mutex_);
  if (const Handle loaded = functions_[kernel].load()) return loaded;
  const InContext context(context_);
  const OutsideCapture outside;
  Handle library = nullptr, entry = nullptr, function = nullptr;
  Status status =
      driver().cuLibraryLoadData(&library, code.const_data_ptr(), nullptr, nullptr, 0, nullptr, nullptr, 0);
  if (status == 0) status = driver().cuLibraryGetKernel(&entry, library, kKernels[kernel].name);
  // Asking for the function loads it now; CUDA's lazy loading would do so in the first launch.
  if (status == 0) status = driver().cuKernelGetFunction(&function, entry);
  TORCH_CHECK(
      status == 0, "the CUDA driver cannot load ", kKernels[kernel].name, " (", told(status),
      "); update the driver to the major version of CUDA that NVRTC has, or a later one, or install "
      "cuda-bindings and NVRTC of the driver's");
  functions_[kernel].store(function, std::memory_order_release);
  return function;
}

void Device::launch_with(size_t kernel, uint32_t blocks, Handle stream, void** arguments) {
  const Handle entry = function(kernel);
  const InContext context(context_);
  const Status status = driver().cuLaunchKernel(
      entry, blocks, 1, 1, kKernels[kernel].threads, 1, 1, 0, stream, arguments, nullptr);
  TORCH_CHECK(
      status == 0, "the CUDA driver refused ", kKernels[kernel].name, " (", blocks, " blocks) on ", device(),
      ": ", told(status));
}

namespace {

size_t number_of(std::string_view name, std::string_view norm) {
  for (size_t i = 0; i < kKernels.size(); ++i) {
    if (kKernels[i].name == name && kKernels[i].norm == norm) return i;
  }
  TORCH_CHECK(false, "there is no CUDA kernel ", name, " ", norm, "; cuda_kernels.h lists those there are");
}

void load_by_name(int64_t index, c10::string_view name, c10::string_view norm) {
  Device* device = devices.at(static_cast<size_t>(index)).load();
  TORCH_CHECK(device != nullptr, "cuda:", index, " is not open; amp_plugin.kernels.cuda.register opens it");
  device->function(number_of({name.data(), name.size()}, {norm.data(), norm.size()}));
}

std::vector<std::string> all_kernels() {
  std::vector<std::string> rows;
  for (const Kernel& kernel : kKernels)
    rows.push_back(c10::str(kernel.name, " ", kernel.norm, " ", kernel.threads));
  return rows;
}

TORCH_LIBRARY_FRAGMENT(amp_plugin, library) {
  library.def(
      "_cuda_open(int device, int multiprocessors) -> ()", [](int64_t index, int64_t multiprocessors) {
        Device::open(static_cast<c10::DeviceIndex>(index), static_cast<uint32_t>(multiprocessors));
      });
  library.def("_cuda_load(int device, str name, str norm) -> ()", &load_by_name);
  library.def("_cuda_kernels() -> str[]", &all_kernels);
  library.def("_cuda_uploads(int device) -> int", [](int64_t index) {
    const Device* device = Device::find(static_cast<c10::DeviceIndex>(index));
    return device == nullptr ? int64_t{0} : device->uploads();
  });
}

}  // namespace
}  // namespace amp_plugin::cuda
