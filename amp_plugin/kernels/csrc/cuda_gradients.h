// What is launched on gradients whose table is on the device.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "cuda_device.h"

namespace amp_plugin::cuda {

using Measured = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

class GradientTable {
 public:
  // The table of dense gradients; it is uploaded if one of them has moved.
  GradientTable(Device& device, at::TensorList gradients);
  // The same where the gradients have not moved since another call on this stream: each is read once. None
  // otherwise, and where no kernel of ours runs, or a graph is captured. For callers that hold the GIL and
  // keep the gradients.
  static std::optional<GradientTable> kept(at::TensorList gradients, const at::Tensor& scale);

  // One launch each; they read no tensor but the number. `kernel` is kNormCheck or kUnscale.
  Measured measure(size_t kernel, const at::Tensor& inv_scale, double p, bool is_scale) const;
  at::Tensor multiply_(const at::Tensor& factor) const;

 private:
  GradientTable(Device& device, Handle stream, const Table& table, size_t count)
      : device_(device), stream_(stream), table_(table), count_(count) {}

  Device& device_;
  Handle stream_;
  Table table_;
  size_t count_;
};

void increment_versions(at::TensorList tensors);

}  // namespace amp_plugin::cuda
