// What torch asks of a device: whether it exists, which one is current, its memory and its streams.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "host_device.h"

namespace host_device {

thread_local c10::DeviceIndex current_index = 0;

namespace {

std::atomic<int64_t> bytes_in_use{0}, most_in_use{0};
// allocations of pinned memory that would break another thread's capture
std::atomic<int64_t> unsafe_allocations{0};
std::atomic<int64_t> debug_mode{0};  // as in torch.cuda.set_sync_debug_mode: 1 warns, 2 raises an error

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
  c10::Stream getStream(c10::Device device) const override { return shown(current_stream(device.index())); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device_at(device.index()));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<int64_t> last{1000};  // streams made by Python have lower numbers
    return shown({device_at(device.index()).index(), ++last});
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    set_current_stream(ours(stream));
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(stream.id());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(
      void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Moment();
    *static_cast<Moment*>(*event) = now_on(ours(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) let_wait(ours(stream), *static_cast<Moment*>(event));
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || has_come(*static_cast<Moment*>(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Moment*>(event);
  }
  bool queryStream(const c10::Stream& stream) const override { return has_come(now_on(ours(stream))); }
  void synchronizeStream(const c10::Stream& stream) const override {
    check_may_wait("a stream");
    wait_for(now_on(ours(stream)));
  }
  void synchronizeEvent(void* event) const override {
    check_may_wait("an event");
    if (event != nullptr) wait_for(*static_cast<Moment*>(event));
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    check_may_wait("the device");
    wait_for_all();
  }
  bool isStreamCapturing(const c10::Stream&) const override { return capturing(); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override;

 private:
  static c10::Stream shown(Stream stream) {
    return c10::Stream(c10::Stream::UNSAFE, device_at(stream.device), stream.number);
  }
  static Stream ours(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Block {
  void* memory;
  size_t bytes;
  std::function<void()> free;
  Stream stream;  // the stream it was allocated on; later work of that stream may reuse it
  std::vector<Stream> users;  // other streams that were recorded for it (record_stream)
};

// Releases a block as torch's allocator does: others may use the memory after the work on all streams
// recorded for it.
void release(void* context) {
  auto* block = static_cast<Block*>(context);
  if (works_late()) {
    for (const Stream& user : block->users) let_wait(block->stream, now_on(user));
    submit(
        block->stream, [memory = block->memory, bytes = block->bytes] { std::memset(memory, 0xFF, bytes); });
    when_all_is_done(block->free);
  } else {
    block->free();
  }
  delete block;
}

void Guard::recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const {
  if (auto* block = data.cast_context<Block>(&release)) block->users.push_back(ours(stream));
}

}  // namespace

c10::DataPtr device_memory(void* memory, size_t bytes, c10::Device device, std::function<void()> free) {
  const Stream stream = current_stream(device.index());
  return {memory, new Block{memory, bytes, std::move(free), stream, {}}, &release, device};
}

namespace {

struct Memory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, device_at(-1)};
    void* memory = std::aligned_alloc(512, (bytes + 511) / 512 * 512);
    std::memset(memory, 0xAB, bytes);
    const int64_t in_use = bytes_in_use += int64_t(bytes);
    for (int64_t most = most_in_use; most < in_use && !most_in_use.compare_exchange_weak(most, in_use);) {
    }
    return device_memory(memory, bytes, device_at(-1), [memory, bytes] {
      bytes_in_use -= int64_t(bytes);
      std::free(memory);
    });
  }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    std::memcpy(target, source, bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    TORCH_INTERNAL_ASSERT(!capturing());
    card_is_full = false;
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Guard().recordDataPtrOnStream(data, stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
};

}  // namespace

std::atomic<bool> card_is_full{false};

c10::Allocator* allocator() {
  static Memory memory;
  return &memory;
}

namespace {

[[maybe_unused]] const bool is_known = [] {
  c10::SetAllocator(c10::kCUDA, allocator());
  return true;
}();

}  // namespace

void check_may_wait(const std::string& what) {
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
  c10::Allocator* getPinnedMemoryAllocator() const override {
    if (capture_mode_of_this_thread() == 0) ++unsafe_allocations;
    return c10::GetCPUAllocator();
  }
  void deviceSynchronize(c10::DeviceIndex) const override { Guard().synchronizeDevice(-1); }
};

namespace {

TORCH_LIBRARY(host_device, library) {
  library.def("set_sync_debug_mode(int mode) -> ()", [](int64_t mode) { debug_mode = mode; });
  library.def("synchronize() -> ()", [] { Guard().synchronizeDevice(-1); });
  library.def("card_is_full(bool on) -> ()", [](bool on) { card_is_full = on; });
  library.def("unsafe_allocations() -> int", [] { return unsafe_allocations.load(); });
  library.def("memory_allocated() -> int", [] { return bytes_in_use.load(); });
  library.def("max_memory_allocated() -> int", [] { return most_in_use.load(); });
  library.def("reset_peak_memory_stats() -> ()", [] { most_in_use = bytes_in_use.load(); });
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

using CUDAHooks = host_device::Hooks;  // torch looks for a class of this name
REGISTER_CUDA_HOOKS(CUDAHooks)

// These functions say which accelerator torch was compiled for. This library is preloaded, so its versions
// are found first.
namespace accelerator {
std::optional<c10::DeviceType> getAccelerator(bool) { return c10::kCUDA; }
bool isAccelerator(c10::DeviceType type) { return type == c10::kCUDA; }
}  // namespace accelerator

}  // namespace at
