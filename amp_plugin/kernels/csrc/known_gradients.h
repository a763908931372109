// Launches on gradients that a device has seen before, for callers that know nothing of the device's kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <tuple>

namespace amp_plugin {

class KnownGradients {
 public:
  using Measured = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

  virtual ~KnownGradients() = default;
  // unscale_ if it writes, else norm_check; these two read no tensor but the number.
  virtual Measured measure(bool writes, const at::Tensor& inv_scale, double p, bool is_scale) const = 0;
  virtual at::Tensor multiply_(const at::Tensor& factor) const = 0;
};

// The gradients on the device of `scale` if they have not moved since another call on this stream: each is
// read once. Null otherwise, where no kernel of ours runs, and where a graph is captured. For callers that
// hold the GIL and keep the gradients.
std::unique_ptr<KnownGradients> known_gradients(at::TensorList gradients, const at::Tensor& scale);

// Who answers; nobody does in a core without kernels for GPUs.
using FindKnownGradients = std::unique_ptr<KnownGradients> (*)(at::TensorList, const at::Tensor&);
void find_known_gradients_with(FindKnownGradients find);

void increment_versions(at::TensorList tensors);

}  // namespace amp_plugin
