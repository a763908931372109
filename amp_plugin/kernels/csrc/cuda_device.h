// A CUDA device that runs our kernels. All kernels are loaded when the device is opened, and are launched on
// torch's streams.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <algorithm>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "cuda_layout.h"
#include "cuda_table.h"

namespace amp_plugin::cuda {

// The primary context of a device, and the CUDA driver's number of the device. That number can differ from
// torch's index.
struct Context {
  explicit Context(c10::DeviceIndex index);
  Handle handle = nullptr;
  int device = -1;
};

class Device {
 public:
  // Returns the device, or null if plain torch ops are used instead of our kernels. Asks Python once per
  // device.
  static Device* find(c10::DeviceIndex index);
  // Loads all kernels. Python has already compiled them: `code` is their machine code (uint8, on the host),
  // and `most_blocks` says how many blocks of each the device can run at once. The first word of a name is
  // the function in cuda/<word>.cu; a second word is the norm or the rule that the file is compiled for.
  static void open(
      int64_t index, at::IntArrayRef most_blocks, const std::vector<std::string>& names, at::TensorList code);

  c10::Device device() const { return {c10::kCUDA, index_}; }
  // torch's current stream, and whether it is being captured into a CUDA graph.
  Handle stream() const;
  static bool is_captured(Handle stream);

  SharedTable table(const Rows& rows, Handle stream);
  // The table of dense tensors that are only read, or are written in place.
  SharedTable table(at::TensorList tensors, Handle stream);
  // The table of these tensors if it is already on the device. Returns null during a capture, and never
  // waits.
  SharedTable kept_table(at::TensorList tensors, Handle stream);
  int64_t uploads() const { return tables_.uploads(); }

  // Launches a kernel of one thread on the current stream. The arguments must have exactly the types of the
  // kernel's parameters.
  template <typename... Arguments>
  void launch(std::string_view kernel, Arguments... arguments) {
    void* pointers[] = {&arguments...};
    launch_with(kernel, 1, 1, stream(), pointers);
  }
  // Launches a kernel on the tensors of a table, which is its first argument. The launch has as many blocks
  // as the table can use, but no more than the device can run at once.
  template <typename... Arguments>
  void launch_on(const Table& table, Handle stream, std::string_view kernel, Arguments... arguments) {
    void* pointers[] = {const_cast<Table*>(&table), &arguments...};
    launch_with(kernel, std::max(table.granules, 1U), kThreads, stream, pointers);
  }

 private:
  struct Kernel {
    Handle handle;
    uint32_t most_blocks;
  };
  Device(
      c10::DeviceIndex index, at::IntArrayRef most_blocks, const std::vector<std::string>& names,
      at::TensorList code);
  void launch_with(
      std::string_view kernel, uint32_t blocks, uint32_t threads, Handle stream, void** arguments);

  c10::DeviceIndex index_;
  Context primary_;
  std::map<std::string, Kernel, std::less<>> kernels_;  // by name
  TableCache tables_;
};

}  // namespace amp_plugin::cuda
