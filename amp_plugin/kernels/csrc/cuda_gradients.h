// norm_check, unscale_ and multiply_ as launches on a table of gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "cpu_ops.h"
#include "cuda_device.h"

namespace amp_plugin::cuda {

struct GradientTable {
  Device& device;
  Handle stream;
  SharedTable table;

  // Makes the table of dense gradients. It is uploaded if one of them has moved.
  static GradientTable of(at::TensorList gradients, c10::Device on);

  // Finds the table that an earlier call on this stream made of these gradients. Returns nothing if there is
  // none, if a gradient has moved since, if our kernels do not run on the device of `scale`, or during a
  // capture.
  static std::optional<GradientTable> kept(at::TensorList gradients, const at::Tensor& scale);

  // Each of these two is one launch and reads no tensor on the host. `measure` is unscale_ if `writes`, else
  // norm_check.
  Measured measure(bool writes, const at::Tensor& inv_scale, double p, bool is_scale) const;
  at::Tensor multiply_(
      const at::Tensor& factor, std::optional<double> max_norm, const OptionalTensor& skipped) const;
};

}  // namespace amp_plugin::cuda
