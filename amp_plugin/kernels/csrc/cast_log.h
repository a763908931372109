// A log of the casts that autocast makes. It is off unless somebody asks for it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/operator_name.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

namespace amp_plugin {

// A cast, in the order of the fields: op, device, dtype before, dtype after, position of the argument, number
// of elements, bytes moved, whether it came from a cache, whether the tensor is a leaf that requires grad,
// the scope number, and the address of the TensorImpl.
using LoggedCast = std::tuple<
    std::string, std::string, c10::ScalarType, c10::ScalarType, int64_t, int64_t, int64_t, bool, bool,
    int64_t, uintptr_t>;

extern std::atomic<bool> cast_log_on;

inline bool is_logging_casts() { return cast_log_on.load(std::memory_order_relaxed); }

void log_cast(
    const c10::OperatorName& op, size_t argument, const at::Tensor& from, c10::ScalarType to, bool cached);

// Return true if this cast from torch's cache was already returned once while the log was on.
bool was_logged(const at::Tensor& cast);

// Turns the log on or off, and returns whether it was on. Turning it on empties it.
bool log_casts(bool on);

// Sets this thread's scope number, and returns the previous one. Each cast is logged with it, so that the
// caller can tell where in the program a cast was made. -1 means no scope.
int64_t set_log_scope(int64_t scope);

// Returns the casts that were logged since the last call.
std::vector<LoggedCast> take_cast_log();

}  // namespace amp_plugin
