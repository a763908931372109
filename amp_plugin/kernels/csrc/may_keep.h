// Which casts may be kept, and for how long.
#pragma once

#include <ATen/core/Tensor.h>

namespace amp_plugin {

// How long a cast of a tensor may be kept.
enum class Lifetime : uint8_t {
  kNone,  // somebody refills its memory unseen, as FSDP does with its unsharded parameters
  kRegion,
  kWindow,  // a parameter: it outlives regions
};

// Answers for a tensor that `is_weight` accepts.
using LifetimeTest = Lifetime (*)(const at::Tensor& tensor);
void set_lifetime_test(LifetimeTest test);
Lifetime lifetime_of_casts(const at::Tensor& tensor);

// True if nothing that records or transforms the program is active: a cast made under jit tracing, a
// dispatch mode (proxy, fake), functorch, stream capture or inference mode must not outlive it.
bool may_keep(c10::DeviceType device);

// True for what torch.autocast keeps the casts of: an fp32 leaf that requires grad and is no view.
bool is_weight(const at::Tensor& tensor);

}  // namespace amp_plugin
