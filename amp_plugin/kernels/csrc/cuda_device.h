// A CUDA device that runs our kernels: code loaded once, launches on torch's streams. Python only compiles.
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <mutex>

#include "cuda_kernels.h"
#include "cuda_table.h"

namespace amp_plugin::cuda {

// Makes a context current, and the one before again at the end.
class InContext {
 public:
  explicit InContext(Handle context);
  ~InContext();
  InContext(const InContext&) = delete;
  InContext& operator=(const InContext&) = delete;

 private:
  Handle before_ = nullptr;
  bool changed_ = false;
};

class Device {
 public:
  // The device that runs our kernels, or null where plain torch serves. Asks Python once.
  static Device* find(c10::DeviceIndex index);
  // Makes it known; Python has found that the hardware is new enough.
  static Device& open(c10::DeviceIndex index, uint32_t multiprocessors);

  c10::Device device() const { return {c10::kCUDA, index_}; }
  // Blocks of a kernel that takes a table.
  uint32_t blocks(const Table& table) const { return table.blocks(most_blocks_); }

  // The current stream of torch, and whether it is being captured into a graph.
  Handle stream() const;
  static bool is_captured(Handle stream);

  Table table(const Rows& rows, Handle stream);
  // Of dense tensors that are read, or written in place.
  Table table(at::TensorList tensors, Handle stream);
  // One on the device where nothing is captured, without a wait; see TableCache::kept.
  std::optional<KeptTable> kept_table(size_t count, const at::Tensor& first, Handle stream);
  int64_t uploads() const { return tables_.uploads(); }

  // Launches a kernel; the arguments have exactly the types of its parameters.
  template <typename... Arguments>
  void launch(size_t kernel, uint32_t blocks, Handle stream, Arguments... arguments) {
    void* pointers[] = {&arguments...};
    launch_with(kernel, blocks, stream, pointers);
  }

  // Compiles and loads a kernel if it was not yet.
  Handle function(size_t kernel);

 private:
  Device(c10::DeviceIndex index, uint32_t multiprocessors);
  void launch_with(size_t kernel, uint32_t blocks, Handle stream, void** arguments);
  Handle load(size_t kernel);

  c10::DeviceIndex index_;
  Handle context_ = nullptr;
  uint32_t most_blocks_;
  std::mutex mutex_;
  std::array<std::atomic<Handle>, kKernels.size()> functions_{};
  TableCache tables_;
};

}  // namespace amp_plugin::cuda
