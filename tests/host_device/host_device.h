// A CUDA device made of host memory, for tests on machines without one. See host_device.py.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <functional>
#include <string>

namespace host_device {

constexpr c10::DeviceIndex kDevices = 2;
extern thread_local c10::DeviceIndex current_index;

inline c10::Device device_at(c10::DeviceIndex index) {
  return {c10::kCUDA, index < 0 ? current_index : index};
}

// Where the tensors of the device live; its memory is full of 0xAB when it is new.
c10::Allocator* allocator();

// The host waits for the device: told of as torch.cuda.set_sync_debug_mode has it, an error during a capture.
void wait(const std::string& what);

// Carry out an op of the device by the CPU's kernel for it.
void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// -- the graph that is being captured --------------------------------------------------------------

bool capturing();

// A storage of the device that an op takes: what it holds comes back when the capture ends.
void found(const c10::Storage& storage);

// A storage that the capture itself allocated: it holds rubbish until the graph is replayed.
void made(const c10::Storage& storage);

// What a replay does next.
void record(std::function<void()> work);

}  // namespace host_device
