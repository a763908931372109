// What is launched on gradients whose table is on the device.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "cuda_device.h"
#include "known_gradients.h"

namespace amp_plugin::cuda {

using Measured = KnownGradients::Measured;

class GradientTable final : public KnownGradients {
 public:
  // The table of dense gradients; it is uploaded if one of them has moved.
  GradientTable(Device& device, at::TensorList gradients);
  // See known_gradients().
  static std::unique_ptr<KnownGradients> kept(size_t count, const at::Tensor& first, const at::Tensor& scale);

  bool are_same(size_t begin, const at::Tensor* const* gradients, size_t count) const override;
  // One launch each.
  Measured measure(bool writes, const at::Tensor& inv_scale, double p, bool is_scale) const override;
  at::Tensor multiply_(const at::Tensor& factor) const override;

 private:
  GradientTable(Device& device, Handle stream, SharedTable table, size_t count)
      : device_(device), stream_(stream), table_(std::move(table)), count_(count) {}

  Device& device_;
  Handle stream_;
  SharedTable table_;
  size_t count_;
};

}  // namespace amp_plugin::cuda
