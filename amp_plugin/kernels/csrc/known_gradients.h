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
  // Whether gradients, from the one numbered `begin` on, are where they were; each is read once.
  virtual bool are_same(size_t begin, const at::Tensor* const* gradients, size_t count) const = 0;
  // Once all are.
  // unscale_ if it writes, else norm_check; these two read no tensor but the number.
  virtual Measured measure(bool writes, const at::Tensor& inv_scale, double p, bool is_scale) const = 0;
  virtual at::Tensor multiply_(const at::Tensor& factor) const = 0;
};

// So many gradients on the device of `scale`, of which another call on this stream had the first one too.
// Null if there are none, where no kernel of ours runs, and where a graph is captured. For callers that hold
// the GIL and keep the gradients.
std::unique_ptr<KnownGradients> known_gradients(
    size_t count, const at::Tensor& first, const at::Tensor& scale);

// Who answers; nobody does in a core without kernels for GPUs.
using FindKnownGradients = std::unique_ptr<KnownGradients> (*)(size_t, const at::Tensor&, const at::Tensor&);
void find_known_gradients_with(FindKnownGradients find);

}  // namespace amp_plugin
