// What is launched on gradients whose table is on the device; calls of the ops come here too.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

#include "cpu_ops.h"
#include "cuda_device.h"

namespace amp_plugin::cuda {

class GradientTable {
 public:
  // The table of dense gradients; it is uploaded if one of them has moved.
  GradientTable(Device& device, at::TensorList gradients);

  // So many gradients on the device of `scale`, of which another call on this stream had the first one too.
  // Null if there are none, where no kernel of ours runs, and where a graph is captured. For callers that
  // hold the GIL and keep the gradients.
  static std::unique_ptr<GradientTable> kept(size_t count, const at::Tensor& first, const at::Tensor& scale);
  // Whether gradients, from the one numbered `begin` on, are where they were; each is read once.
  bool are_same(size_t begin, const at::Tensor* const* gradients, size_t count) const;

  // Once all are, one launch each, which reads no tensor but the number: unscale_ if it writes, else
  // norm_check.
  Measured measure(bool writes, const at::Tensor& inv_scale, double p, bool is_scale) const;
  at::Tensor multiply_(
      const at::Tensor& factor, std::optional<double> max_norm, const OptionalTensor& skipped) const;

 private:
  GradientTable(Device& device, Handle stream, SharedTable table, size_t count)
      : device_(device), stream_(stream), table_(std::move(table)), count_(count) {}

  Device& device_;
  Handle stream_;
  SharedTable table_;
  size_t count_;
};

}  // namespace amp_plugin::cuda
