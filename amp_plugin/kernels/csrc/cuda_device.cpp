#include "cuda_device.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <memory>

namespace amp_plugin::cuda {
namespace {

constexpr size_t kMostDevices = 64;
constexpr Status kNoBinaryForGpu = 209;
enum class Server : uint8_t { kUnknown, kKernels, kPlainTorch };

std::array<std::atomic<Device*>, kMostDevices> devices{};
std::array<std::atomic<Server>, kMostDevices> servers{};

const c10::impl::DeviceGuardImplInterface& guard() { return *c10::impl::getDeviceGuardImpl(c10::kCUDA); }

// Makes a context of the device current for the lifetime of this object. If another context of the same
// device (such as a green context) is current already, it stays current.
class OnDevice {
 public:
  explicit OnDevice(const Context& primary) {
    check(driver().cuCtxGetCurrent(&before_), "report the current context");
    if (before_ == primary.handle || is_of(before_, primary.device)) return;
    check(driver().cuCtxSetCurrent(primary.handle), "make the device's context current");
    changed_ = true;
  }
  ~OnDevice() {
    if (changed_) driver().cuCtxSetCurrent(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  // cuCtxGetDevice() needs a current context and fails without one.
  static bool is_of(Handle current, int device) {
    int found = -1;
    return current != nullptr && driver().cuCtxGetDevice(&found) == 0 && found == device;
  }

  Handle before_ = nullptr;
  bool changed_ = false;
};

// Loads a kernel that is not tied to a context. Asking for its function loads it now; otherwise CUDA's lazy
// loading would do so in the first launch.
Handle loaded(const std::string& name, const at::Tensor& code) {
  const std::string function_name = name.substr(0, name.find(' '));
  Handle library = nullptr, kernel = nullptr, function = nullptr;
  Status status =
      driver().cuLibraryLoadData(&library, code.const_data_ptr(), nullptr, nullptr, 0, nullptr, nullptr, 0);
  if (status == 0) status = driver().cuLibraryGetKernel(&kernel, library, function_name.c_str());
  if (status == 0) status = driver().cuKernelGetFunction(&function, kernel);
  TORCH_CHECK(
      status != kNoBinaryForGpu, "the CUDA driver cannot load ", name, " (", told(status),
      "); with CUDA_MODULE_LOADING=EAGER it loads the code on every GPU of the process, and the GPUs have "
      "different architectures; unset CUDA_MODULE_LOADING");
  TORCH_CHECK(
      status == 0, "the CUDA driver cannot load ", name, " (", told(status),
      "); it may be older than NVRTC: update the driver, or install cuda-bindings and NVRTC of the CUDA "
      "version that the driver has");
  return kernel;
}

}  // namespace

Context::Context(c10::DeviceIndex index) {
  check(driver().cuDeviceGet(&device, index), "find the device");
  check(driver().cuDevicePrimaryCtxRetain(&handle, device), "create a context for the device");
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

void Device::open(
    int64_t index, at::IntArrayRef most_blocks, const std::vector<std::string>& names, at::TensorList code) {
  auto& place = devices.at(static_cast<size_t>(index));
  if (place.load() != nullptr) return;
  std::unique_ptr<Device> made(new Device(static_cast<c10::DeviceIndex>(index), most_blocks, names, code));
  Device* nothing = nullptr;
  if (place.compare_exchange_strong(nothing, made.get())) made.release();  // lives until the process ends
}

Device::Device(
    c10::DeviceIndex index, at::IntArrayRef most_blocks, const std::vector<std::string>& names,
    at::TensorList code)
    : index_(index),
      primary_(index),
      tables_({c10::kCUDA, index}, static_cast<uint32_t>(std::ranges::max(most_blocks))) {
  const OnDevice current(primary_);
  const OutsideCapture outside;
  for (size_t i = 0; i < names.size(); ++i)
    kernels_[names[i]] = {loaded(names[i], code[i]), static_cast<uint32_t>(most_blocks[i])};
  tables_.reserve();
}

Handle Device::stream() const { return guard().getStreamNativeHandle(guard().getStream(device())); }

bool Device::is_captured(Handle stream) {
  int status = 0;
  check(driver().cuStreamIsCapturing(stream, &status), "report whether the stream is being captured");
  return status == kCaptured;
}

SharedTable Device::table(const Rows& rows, Handle stream) {
  const OnDevice current(primary_);
  return tables_.of(rows, stream, is_captured(stream));
}

SharedTable Device::table(at::TensorList tensors, Handle stream) {
  SharedTable kept = kept_table(tensors, stream);
  return kept ? kept : table(rows_of(tensors, device()), stream);
}

SharedTable Device::kept_table(at::TensorList tensors, Handle stream) {
  if (tensors.empty()) return nullptr;
  const OnDevice current(primary_);
  if (is_captured(stream)) return nullptr;
  SharedTable kept = tables_.kept(tensors.size(), tensors[0], stream);
  return kept && are_of(kept->rows.data(), tensors, device()) ? kept : nullptr;
}

void Device::launch_with(
    std::string_view kernel, uint32_t blocks, uint32_t threads, Handle stream, void** arguments) {
  const auto found = kernels_.find(kernel);
  TORCH_CHECK(found != kernels_.end(), "there is no machine code for the CUDA kernel ", kernel);
  const OnDevice current(primary_);
  const uint32_t taken = std::min(blocks, found->second.most_blocks);
  const Status status = driver().cuLaunchKernel(
      found->second.handle, taken, 1, 1, threads, 1, 1, 0, stream, arguments, nullptr);
  TORCH_CHECK(
      status == 0, "the CUDA driver refused ", kernel, " (", taken, " blocks) on ", device(), ": ",
      told(status));
}

TORCH_LIBRARY_FRAGMENT(amp_plugin, library) {
  library.def("_cuda_open(int device, int[] most_blocks, str[] kernels, Tensor[] code) -> ()", &Device::open);
  library.def("_cuda_uploads(int device) -> int", [](int64_t index) {
    const Device* device = Device::find(static_cast<c10::DeviceIndex>(index));
    return device == nullptr ? int64_t{0} : device->uploads();
  });
}

}  // namespace amp_plugin::cuda
