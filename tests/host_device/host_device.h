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

// Whether torch's cache holds all of the card, so that the driver has none left.
extern std::atomic<bool> card_is_full;

// Where the tensors of the device live; its memory is full of 0xAB when it is new.
c10::Allocator* allocator();

// Memory as a tensor of the device has it; `free` is called when the last tensor on it is gone.
c10::DataPtr device_memory(void* memory, size_t bytes, c10::Device device, std::function<void()> free);

// The host waits for the device: told of as torch.cuda.set_sync_debug_mode has it, an error during a capture.
void check_may_wait(const std::string& what);

// Carry out an op of the device by the CPU's kernel for it.
void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// -- streams ---------------------------------------------------------------------------------------

struct Stream {
  c10::DeviceIndex device;
  int64_t number;  // 0 is the default stream
  friend auto operator<=>(const Stream&, const Stream&) = default;
};

// A place in the work of a stream.
struct Moment {
  Stream stream;
  uint64_t position;
};

// Whether work is put off until somebody waits for it.
bool works_late();
Stream current_stream(c10::DeviceIndex device = -1);
void set_current_stream(Stream stream);

// Put work at the end of a stream, or do it at once.
void submit(Stream stream, std::function<void()> work);
// Do something once no work is put off any more.
void when_all_is_done(std::function<void()> work);

Moment now_on(Stream stream);
bool has_come(const Moment& moment);
void wait_for(const Moment& moment);
void wait_for_all();
// All that is put on a stream from now on runs behind the moment.
void let_wait(Stream stream, const Moment& moment);

// -- what an op has done ----------------------------------------------------------------------------

// The storages that ops found and made, so that what they did can be undone.
struct Footprint {
  std::vector<std::pair<c10::Storage, std::vector<char>>> before;
  std::map<const c10::StorageImpl*, c10::Storage> made;

  void find(const c10::Storage& storage);
  void make(const c10::Storage& storage);
  void undo();
};

// -- the graph that is being captured --------------------------------------------------------------

bool capturing();

// What the driver allows this thread while another one captures: 0 (global) forbids to allocate.
int capture_mode_of_this_thread();

// A storage of the device that an op takes: what it holds comes back when the capture, or the op, ends.
void found(const c10::Storage& storage);

// A storage that the capture or the op itself allocated: it holds rubbish until the work is done.
void made(const c10::Storage& storage);

// Calls `run`, and undoes what it did to memory.
void without_effect(const std::function<void()>& run);

// Goes when the graph goes.
void keep_with_graph(std::shared_ptr<void> object);

// What a replay does next.
void record(std::function<void()> work);

}  // namespace host_device
