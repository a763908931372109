// A record of every cast autocast makes, while somebody asks for it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/operator_name.h>

#include <atomic>

namespace amp_plugin {

extern std::atomic<bool> cast_log_on;

inline bool is_logging_casts() { return cast_log_on.load(std::memory_order_relaxed); }

void log_cast(
    const c10::OperatorName& op, size_t argument, const at::Tensor& from, c10::ScalarType to, bool cached);

}  // namespace amp_plugin
