// Functions that torch exports for autocast. They are declared here because <ATen/autocast_mode.h> includes
// all of ATen.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

namespace at::autocast {
TORCH_API bool is_autocast_enabled(at::DeviceType device_type);
TORCH_API void set_autocast_enabled(at::DeviceType device_type, bool enabled);
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
TORCH_API void set_autocast_dtype(at::DeviceType device_type, at::ScalarType dtype);
TORCH_API void clear_cache();
TORCH_API int increment_nesting();
TORCH_API int decrement_nesting();
TORCH_API bool is_autocast_cache_enabled();
TORCH_API void set_autocast_cache_enabled(bool enabled);
TORCH_API at::Tensor cached_cast(at::ScalarType dtype, const at::Tensor& tensor, at::DeviceType device_type);
}  // namespace at::autocast

namespace at::caching {
TORCH_API bool is_cached_tensor(const at::Tensor& tensor);
}

namespace torch::autograd {
TORCH_API int get_current_graph_task_id();
}
