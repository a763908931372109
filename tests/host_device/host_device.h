// A CUDA device made of host memory, for tests on machines without one. See host_device.py.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <atomic>
#include <compare>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace host_device {

constexpr c10::DeviceIndex kDevices = 2;
extern thread_local c10::DeviceIndex current_index;

inline c10::Device device_at(c10::DeviceIndex index) {
  return {c10::kCUDA, index < 0 ? current_index : index};
}

// Simulates a full card: torch's cache holds all memory, and the driver has none left.
extern std::atomic<bool> card_is_full;

// The allocator of the device's tensors. New memory is filled with 0xAB.
c10::Allocator* allocator();

// Wraps memory for a tensor of the device. `free` is called when the last tensor that uses it is gone.
c10::DataPtr device_memory(void* memory, size_t bytes, c10::Device device, std::function<void()> free);

// Call this before the host waits for the device. It reports as torch.cuda.set_sync_debug_mode asks, and
// raises an error during a capture.
void check_may_wait(const std::string& what);

// Runs an op of the device with the CPU's kernel.
void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// -- streams ---------------------------------------------------------------------------------------

struct Stream {
  c10::DeviceIndex device;
  int64_t number;  // 0 is the default stream
  friend auto operator<=>(const Stream&, const Stream&) = default;
};

// A position in the work of a stream.
struct Moment {
  Stream stream;
  uint64_t position;
};

// Return true if work is deferred until somebody waits for it.
bool works_late();
Stream current_stream(c10::DeviceIndex device = -1);
void set_current_stream(Stream stream);

// Appends work to a stream, or runs it now.
void submit(Stream stream, std::function<void()> work);
// Runs `work` when no deferred work is left.
void when_all_is_done(std::function<void()> work);

Moment now_on(Stream stream);
bool has_come(const Moment& moment);
void wait_for(const Moment& moment);
void wait_for_all();
// Makes all later work of a stream run after the moment.
void let_wait(Stream stream, const Moment& moment);

// -- what an op has done ----------------------------------------------------------------------------

// The storages that ops read or allocated, so that their effects can be undone.
struct Footprint {
  std::vector<std::pair<c10::Storage, std::vector<char>>> before;
  std::map<const c10::StorageImpl*, c10::Storage> made;

  void find(const c10::Storage& storage);
  void make(const c10::Storage& storage);
  void undo();
};

// -- the graph that is being captured --------------------------------------------------------------

bool capturing();

// What the driver allows this thread while another thread captures. In mode 0 (global), it must not allocate.
int capture_mode_of_this_thread();

// Notes a storage that an op uses. Its contents are restored when the capture, or the op, ends.
void found(const c10::Storage& storage);

// Notes a storage that the capture or the op itself allocated. Its contents are meaningless until the work is
// done.
void made(const c10::Storage& storage);

// Calls `run`, then undoes its changes to memory.
void without_effect(const std::function<void()>& run);

// Keeps an object alive as long as the graph.
void keep_with_graph(std::shared_ptr<void> object);

// Adds work to the graph that is being captured. A replay runs it.
void record(std::function<void()> work);

}  // namespace host_device
