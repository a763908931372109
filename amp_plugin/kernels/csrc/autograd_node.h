// What autograd knows of a tensor, asked without its headers.
#pragma once

#include <ATen/core/Tensor.h>

namespace amp_plugin {

// The gradients of so many tensors, undefined ones where there are none; their fields are on their way.
void find_gradients(const c10::TensorImpl* const* tensors, size_t count, const at::Tensor** gradients);

// Whether a hook runs once the parameter's gradient is there.
bool has_post_accumulate_hooks(const at::Tensor& param);

}  // namespace amp_plugin
