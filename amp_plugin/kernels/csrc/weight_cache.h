// Casts of weights, kept while a thread's outermost region is open.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

namespace amp_plugin {

// True if nothing that records or transforms the program is active: a cast made under jit tracing, a
// dispatch mode (proxy, fake), functorch, stream capture or inference mode must not outlive it.
bool may_cache(c10::DeviceType device);

// True for a tensor whose cast may be kept: an fp32 leaf that requires grad and is no view, in memory
// that nobody refills.
bool is_cacheable_weight(const at::Tensor& tensor);

// Asks whether somebody refills a tensor's memory unseen, as FSDP does with its unsharded parameters.
using ManagedTest = bool (*)(const at::Tensor& tensor);
void set_managed_test(ManagedTest test);

// The kept cast of a weight, or an undefined tensor if there is none that is still right.
at::Tensor find_cast(const at::Tensor& weight, c10::ScalarType dtype);
void keep_cast(const at::Tensor& weight, const at::Tensor& cast);

// Forgets this thread's casts.
void clear_weight_cache();

// Forgets the casts of every weight in this thread that shares storage with `tensor`.
void forget_casts_of_storage(const at::Tensor& tensor);

// Makes every cast kept so far, in every thread, invalid: weights have changed.
void invalidate_weight_casts();

// Counts invalidations; a kept cast is good only at the count it was made.
uint64_t weights_epoch();

// Casts kept in this thread; for tests and diagnosis.
int64_t kept_cast_count();

}  // namespace amp_plugin
