// A CUDA device that runs our kernels: all loaded when it is opened, launched on torch's streams.
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

// The function in cuda/<file>.cu that a name begins with; behind a space, the norm or the rule that the file
// is compiled for.
struct Kernel {
  std::string name;
  uint32_t threads;  // of a block
};

// In the order of kernels(); the first two stand for one kernel for each norm, the last for one for each
// rule.
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

// The kernel of a rule, one of step_rules().
inline size_t step_kernel(const StepRule& rule) {
  return kStep + static_cast<size_t>(&rule - step_rules().data());
}

// The primary context of a device, and the driver's number of the device, which is not torch's index.
struct Context {
  explicit Context(c10::DeviceIndex index);
  Handle handle = nullptr;
  int device = -1;
};

class Device {
 public:
  // Machine code of a kernel, uint8 on the host, its name as in kernels(), and how many of its blocks the
  // device runs at once.
  struct Code {
    std::string name;
    uint32_t most_blocks;
    at::Tensor bytes;
  };

  // The device that runs our kernels, or null where plain torch serves. Asks Python once.
  static Device* find(c10::DeviceIndex index);
  // Loads all kernels; Python has compiled them.
  static void open(c10::DeviceIndex index, const std::vector<Code>& kernels);

  c10::Device device() const { return {c10::kCUDA, index_}; }
  // Blocks for a table; of those a launch takes no more than the device runs at once of the kernel.
  static uint32_t blocks(const Table& table) { return std::max(table.granules, uint32_t{1}); }

  // The current stream of torch, and whether it is being captured into a graph.
  Handle stream() const;
  static bool is_captured(Handle stream);

  SharedTable table(const Rows& rows, Handle stream);
  // Of dense tensors that are read, or written in place.
  SharedTable table(at::TensorList tensors, Handle stream);
  // One on the device where nothing is captured, without a wait; see TableCache::kept.
  SharedTable kept_table(size_t count, const at::Tensor& first, Handle stream);
  int64_t uploads() const { return tables_.uploads(); }

  // Launches a kernel; the arguments have exactly the types of its parameters.
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
  std::vector<Loaded> kernels_;  // as kernels()
  TableCache tables_;
};

// Numbers on the device, which kernels read and the host does not.
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

// No address where there is none.
inline DeviceScalar optional_scalar(
    const std::optional<at::Tensor>& tensor, const char* name, c10::Device device) {
  return tensor ? scalar(*tensor, name, device) : DeviceScalar{nullptr, 0, 0};
}

}  // namespace amp_plugin::cuda
