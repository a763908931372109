// Casts of weights, kept while a thread's outermost region is open.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

namespace amp_plugin {

// The kept cast of a weight, or an undefined tensor if there is none that is still right.
at::Tensor find_cast(const at::Tensor& weight, c10::ScalarType dtype);
void keep_cast(const at::Tensor& weight, const at::Tensor& cast);

// Forgets this thread's casts.
void clear_region_casts();

// Forgets the casts of every weight in this thread that shares storage with `tensor`.
void forget_casts_of_storage(const at::Tensor& tensor);

// Forgets every thread's casts: weights may have changed without a version counter that shows it.
void forget_all_casts();

// Casts kept in this thread; for tests and diagnosis.
int64_t kept_cast_count();

}  // namespace amp_plugin
