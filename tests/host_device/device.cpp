// What torch asks of a device itself: which is current, its memory, its streams, whether it is there.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "host_device.h"

namespace host_device {

thread_local c10::DeviceIndex current_index = 0;

namespace {

std::atomic<int64_t> bytes_in_use{0};
std::atomic<int64_t> debug_mode{0};  // of torch.cuda.set_sync_debug_mode: 1 warns, 2 is an error

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    uncheckedSetDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return device_at(-1); }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_index = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { wait("a stream"); }
  void synchronizeEvent(void*) const override { wait("an event"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { wait("the device"); }
  bool isStreamCapturing(const c10::Stream&) const override { return capturing(); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Block {
  void* memory;
  size_t bytes;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  bytes_in_use -= int64_t(block->bytes);
  std::free(block->memory);
  delete block;
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, device_at(-1)};
    void* memory = std::aligned_alloc(512, (bytes + 511) / 512 * 512);
    std::memset(memory, 0xAB, bytes);
    bytes_in_use += int64_t(bytes);
    return {memory, new Block{memory, bytes}, &release, device_at(-1)};
  }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    std::memcpy(target, source, bytes);
  }
};

}  // namespace

c10::Allocator* allocator() {
  static Memory memory;
  return &memory;
}

void wait(const std::string& what) {
  TORCH_CHECK(debug_mode != 2, "called a synchronizing CUDA operation: ", what);
  if (debug_mode == 1) TORCH_WARN("called a synchronizing CUDA operation: ", what);
  TORCH_CHECK(!capturing(), "CUDA error: operation not permitted when stream is capturing: ", what);
}

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  int getNumGPUs() const override { return kDevices; }
  c10::DeviceIndex current_device() const override { return current_index; }
  c10::DeviceIndex getCurrentDevice() const override { return current_index; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current_index = index; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return std::exchange(current_index, index);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  void deviceSynchronize(c10::DeviceIndex) const override { wait("the device"); }
};

namespace {

TORCH_LIBRARY(host_device, library) {
  library.def("set_sync_debug_mode(int mode) -> ()", [](int64_t mode) { debug_mode = mode; });
  library.def("synchronize() -> ()", [] { wait("the device"); });
  library.def("memory_allocated() -> int", [] { return bytes_in_use.load(); });
  library.def(
      "copy_of(Storage storage, Device device) -> Tensor",
      [](const c10::Storage& storage, at::Device device) {
        at::Tensor bytes = at::empty({int64_t(storage.nbytes())}, at::dtype(at::kByte).device(device));
        std::memcpy(bytes.mutable_data_ptr(), storage.data(), storage.nbytes());
        return bytes;
      });
  library.def("exchange_device(int index) -> int", [](int64_t index) {
    TORCH_CHECK(index < kDevices, "CUDA error: invalid device ordinal");
    return int64_t(index < 0 ? current_index : std::exchange(current_index, c10::DeviceIndex(index)));
  });
}

}  // namespace
}  // namespace host_device

namespace at {

using CUDAHooks = host_device::Hooks;  // torch asks for it by this name
REGISTER_CUDA_HOOKS(CUDAHooks)

// A build of torch says by these which accelerator it was compiled for. Preloaded, ours are found first.
namespace accelerator {
std::optional<c10::DeviceType> getAccelerator(bool) { return c10::kCUDA; }
bool isAccelerator(c10::DeviceType type) { return type == c10::kCUDA; }
}  // namespace accelerator

}  // namespace at
