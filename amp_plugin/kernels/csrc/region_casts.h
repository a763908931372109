// Casts of weights that are kept while a thread's outermost region is open, and the conditions for keeping
// them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

namespace amp_plugin {

// A test for tensors whose memory is refilled without a change of their version counter, as FSDP does with
// its unsharded parameters. It is called only for tensors that `is_weight` accepts.
using RefillTest = bool (*)(const at::Tensor& tensor);
void set_refill_test(RefillTest test);
bool is_refilled(const at::Tensor& tensor);

// Returns false while the program is being recorded or transformed: by jit tracing, by a torch mode that
// makes fake tensors or records ops, by functorch, by stream capture, or in inference mode. A cast that is
// made then must not be used afterwards.
bool may_keep(c10::DeviceType device);

// Return true for the tensors whose casts torch.autocast keeps: float32 leaves that require grad and are not
// views.
bool is_weight(const at::Tensor& tensor);

// Returns the kept cast of a weight, or an undefined tensor if there is none or the weight has changed since.
at::Tensor find_cast(const at::Tensor& weight, c10::ScalarType dtype);
void keep_cast(const at::Tensor& weight, const at::Tensor& cast);

// Forgets this thread's casts.
void clear_region_casts();

// Forgets the casts of all threads. Call it when weights may have changed without a change of their version
// counters.
void forget_all_casts();

// The number of casts that this thread keeps; for tests and diagnosis.
int64_t kept_cast_count();

}  // namespace amp_plugin
