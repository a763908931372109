// A log of the casts that autocast makes. It is off unless somebody asks for it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/operator_name.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace amp_plugin {

struct LoggedCast {
  std::string op;
  std::string device;
  std::string before;  // dtype before the cast
  std::string after;
  int64_t argument;
  int64_t elements;
  int64_t bytes;
  bool cached;
  bool is_weight;
  int64_t scope;
  uintptr_t tensor;  // address of the TensorImpl
};

extern std::atomic<bool> cast_log_on;

inline bool is_logging_casts() { return cast_log_on.load(std::memory_order_relaxed); }

void log_cast(
    const c10::OperatorName& op, size_t argument, const at::Tensor& from, c10::ScalarType to, bool cached);

// Return true if this cast from torch's cache was already returned once while the log was on.
bool was_logged(const at::Tensor& cast);

// Turns the log on or off, and returns whether it was on. Turning it on empties it.
bool log_casts(bool on);

// Sets the scope number that this thread's casts are logged with, and returns the previous one. -1 means no
// scope.
int64_t set_log_scope(int64_t scope);

// Returns the casts that were logged since the last call.
std::vector<LoggedCast> take_cast_log();

}  // namespace amp_plugin
