// A CUDA device that runs our kernels. All kernels are loaded when the device is opened, and are launched on
// torch's streams.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cuda_layout.h"
#include "cuda_table.h"
#include "step_rules.h"

namespace amp_plugin::cuda {

// A kernel. The first word of its name is the function in cuda/<word>.cu; a second word is the norm or the
// rule that the file is compiled for.
struct Kernel {
  std::string name;
  uint32_t threads;  // threads per block
};

// Positions in kernels(). kNormCheck and kUnscale are the first of three kernels each, one per norm. kStep is
// the first of the kernels of the rules, one per rule.
enum KernelNumber : size_t {
  kNormCheck = 0,
  kUnscale = 3,
  kMultiply = 6,
  kUpdateScale,
  kClipFactor,
  kJudgeStep,
  kPackWeights,
  kUnpackWeights,
  kPackMeasurements,
  kUnpackMeasurements,
  kStep,
};

const std::vector<Kernel>& kernels();

// The position of a rule's kernel. The rule must be an element of step_rules().
inline size_t step_kernel(const StepRule& rule) {
  return kStep + static_cast<size_t>(&rule - step_rules().data());
}

// The primary context of a device, and the CUDA driver's number of the device. That number can differ from
// torch's index.
struct Context {
  explicit Context(c10::DeviceIndex index);
  Handle handle = nullptr;
  int device = -1;
};

class Device {
 public:
  // One compiled kernel: its name as in kernels(), the number of its blocks that the device can run at once,
  // and its machine code (uint8, on the host).
  struct Code {
    std::string name;
    uint32_t most_blocks;
    at::Tensor bytes;
  };

  // Returns the device, or null if plain torch ops are used instead of our kernels. Asks Python once per
  // device.
  static Device* find(c10::DeviceIndex index);
  // Loads all kernels. Python has already compiled them.
  static void open(c10::DeviceIndex index, const std::vector<Code>& kernels);

  c10::Device device() const { return {c10::kCUDA, index_}; }
  // The number of blocks that a table can use. A launch takes at most as many as the device can run at once.
  static uint32_t blocks(const Table& table) { return std::max(table.granules, uint32_t{1}); }

  // torch's current stream, and whether it is being captured into a CUDA graph.
  Handle stream() const;
  static bool is_captured(Handle stream);

  SharedTable table(const Rows& rows, Handle stream);
  // The table of dense tensors that are only read, or are written in place.
  SharedTable table(at::TensorList tensors, Handle stream);
  // A table that is already on the device; see TableCache::kept. Returns null during a capture, and never
  // waits.
  SharedTable kept_table(size_t count, const at::Tensor& first, Handle stream);
  int64_t uploads() const { return tables_.uploads(); }

  // Launches a kernel. The arguments must have exactly the types of the kernel's parameters.
  template <typename... Arguments>
  void launch(size_t kernel, uint32_t blocks, Handle stream, Arguments... arguments) {
    void* pointers[] = {&arguments...};
    launch_with(kernel, blocks, stream, pointers);
  }

 private:
  struct Loaded {
    Handle kernel;
    uint32_t most_blocks;
  };
  Device(c10::DeviceIndex index, const std::vector<Code>& kernels);
  void launch_with(size_t kernel, uint32_t blocks, Handle stream, void** arguments);

  c10::DeviceIndex index_;
  Context primary_;
  std::vector<Loaded> kernels_;  // in the order of kernels()
  TableCache tables_;
};

// Checks a one-element tensor on the device. Kernels read it; the host does not.
inline void require_one_element(
    const at::Tensor& tensor, const char* name, c10::Device device, at::ScalarType type,
    bool or_double = false) {
  const bool is_right = tensor.scalar_type() == type || (or_double && tensor.scalar_type() == at::kDouble);
  if (tensor.device() == device && tensor.numel() == 1 && is_right) return;
  TORCH_CHECK_VALUE(
      false, name, ": got a tensor of ", tensor.numel(), " elements, ", tensor.scalar_type(), ", on ",
      tensor.device(), "; give one element of ", type, or_double ? " or Double" : "", " on ", device);
}

inline DeviceScalar scalar(
    const at::Tensor& tensor, const char* name, c10::Device device, bool is_inverted = false) {
  require_one_element(tensor, name, device, at::kFloat, true);
  return {tensor.const_data_ptr(), tensor.scalar_type() == at::kDouble, is_inverted};
}

// A missing tensor gives a DeviceScalar with a null address.
inline DeviceScalar optional_scalar(
    const std::optional<at::Tensor>& tensor, const char* name, c10::Device device) {
  return tensor ? scalar(*tensor, name, device) : DeviceScalar{nullptr, 0, 0};
}

}  // namespace amp_plugin::cuda
