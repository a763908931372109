// Which casts a region may keep.
#pragma once

#include <ATen/core/Tensor.h>

namespace amp_plugin {

// Whether somebody refills a tensor's memory with no version counter moving, as FSDP does with its unsharded
// parameters. Answers for a tensor that `is_weight` accepts.
using RefillTest = bool (*)(const at::Tensor& tensor);
void set_refill_test(RefillTest test);
bool is_refilled(const at::Tensor& tensor);

// True if nothing that records or transforms the program is active: a cast made under jit tracing, a
// dispatch mode (proxy, fake), functorch, stream capture or inference mode must not outlive it.
bool may_keep(c10::DeviceType device);

// True for what torch.autocast keeps the casts of: an fp32 leaf that requires grad and is not a view.
bool is_weight(const at::Tensor& tensor);

}  // namespace amp_plugin
