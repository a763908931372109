// Registers the ops that launch CUDA kernels.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string>

#include "cuda_device.h"

namespace amp_plugin {

// Facts about the arguments of a call: the device of the first tensor that is on a GPU, and the length of the
// longest list.
struct SeenArguments {
  std::optional<c10::Device> gpu;
  size_t longest = 0;

  void see(const at::Tensor& tensor) {
    if (!gpu && tensor.is_cuda()) gpu = tensor.device();
  }
  void see(at::TensorList tensors) {
    longest = std::max(longest, tensors.size());
    for (size_t i = 0; i < tensors.size() && !gpu; ++i) see(tensors[i]);
  }
  void see(at::IntArrayRef numbers) { longest = std::max(longest, numbers.size()); }
  template <typename Other>
  void see(const Other&) {}
};

// Registers `op` under this name. Its first argument is the GPU of the tensors, or the CPU if there is none.
// If our kernels do not run on that GPU, or if a list is longer than `most`, the op made of plain torch ops
// (_plain_NAME) is called instead.
template <typename Result, typename... Parameters>
void add_op(
    torch::Library& library, const char* name, Result (*op)(c10::Device, Parameters...),
    size_t most = SIZE_MAX) {
  library.impl(name, [=](Parameters... arguments) -> Result {
    SeenArguments seen;
    (seen.see(arguments), ...);
    if (seen.longest <= most && (!seen.gpu || cuda::Device::find(seen.gpu->index()) != nullptr)) {
      const at::AutoDispatchBelowADInplaceOrView below;
      return op(seen.gpu.value_or(at::kCPU), arguments...);
    }
    const std::string plain = std::string("amp_plugin::_plain_") + name;
    const auto found = c10::Dispatcher::singleton().findSchemaOrThrow(plain.c_str(), "");
    return found.typed<Result(Parameters...)>().call(arguments...);
  });
}

}  // namespace amp_plugin
