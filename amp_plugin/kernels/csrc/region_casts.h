// Casts of weights, kept while a thread's outermost region is open, and which may be.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

namespace amp_plugin {

// Whether somebody refills a tensor's memory with no version counter moving, as FSDP does with its unsharded
// parameters. Answers for a tensor that `is_weight` accepts.
using RefillTest = bool (*)(const at::Tensor& tensor);
void set_refill_test(RefillTest test);
bool is_refilled(const at::Tensor& tensor);

// False while something records or transforms the program: jit tracing, a mode of torch's own that makes
// fake tensors or records ops, functorch, stream capture, inference mode. A cast made there must not outlive
// it.
bool may_keep(c10::DeviceType device);

// True for what torch.autocast keeps the casts of: an fp32 leaf that requires grad and is not a view.
bool is_weight(const at::Tensor& tensor);

// The kept cast of a weight, or an undefined tensor if there is none that is still right.
at::Tensor find_cast(const at::Tensor& weight, c10::ScalarType dtype);
void keep_cast(const at::Tensor& weight, const at::Tensor& cast);

// Forgets this thread's casts.
void clear_region_casts();

// Forgets every thread's casts: weights may have changed without a version counter that shows it.
void forget_all_casts();

// Casts kept in this thread; for tests and diagnosis.
int64_t kept_cast_count();

}  // namespace amp_plugin
