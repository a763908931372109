#include "cast_log.h"

#include <c10/core/ScalarType.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <mutex>
#include <unordered_map>
#include <utility>

namespace amp_plugin {

std::atomic<bool> cast_log_on{false};

namespace {

struct Log {
  std::mutex mutex;
  std::vector<LoggedCast> casts;
  // The weak reference keeps a tensor's address from being reused for another cast.
  std::unordered_map<const c10::TensorImpl*, c10::weak_intrusive_ptr<c10::TensorImpl>> handed_out;
  size_t prune_at = 64;
};

Log& the_log() {
  static auto* log = new Log;
  return *log;
}

thread_local int64_t log_scope = -1;

// Return true while a compiler traces with fake tensors. A cast is then recorded in a graph, and does not
// happen now.
bool is_traced() {
  using Modes = c10::impl::TorchDispatchModeTLS;
  return Modes::get_mode(c10::impl::TorchDispatchModeKey::FAKE).has_value();
}

}  // namespace

void log_cast(
    const c10::OperatorName& op, size_t argument, const at::Tensor& from, c10::ScalarType to, bool cached) {
  if (is_traced()) return;
  const c10::ScalarType before = from.scalar_type();
  const int64_t elements = from.sym_numel().maybe_as_int().value_or(0);
  const auto bytes = static_cast<int64_t>(c10::elementSize(before) + c10::elementSize(to)) * elements;
  auto& log = the_log();
  const std::lock_guard lock(log.mutex);
  log.casts.emplace_back(
      op.name + "." + (op.overload_name.empty() ? "default" : op.overload_name),
      c10::DeviceTypeName(from.device().type(), /*lower_case=*/true), before, to, argument, elements,
      cached ? 0 : bytes, cached, from.is_leaf() && from.requires_grad(), log_scope,
      reinterpret_cast<uintptr_t>(from.unsafeGetTensorImpl()));
}

bool was_logged(const at::Tensor& cast) {
  auto& log = the_log();
  const std::lock_guard lock(log.mutex);
  if (log.handed_out.size() >= log.prune_at) {
    std::erase_if(log.handed_out, [](const auto& entry) { return entry.second.expired(); });
    log.prune_at = std::max<size_t>(64, 2 * log.handed_out.size());
  }
  return !log.handed_out.try_emplace(cast.unsafeGetTensorImpl(), cast.getIntrusivePtr()).second;
}

bool log_casts(bool on) {
  const bool was_on = cast_log_on.exchange(on);
  auto& log = the_log();
  const std::lock_guard lock(log.mutex);
  if (!was_on) log.casts.clear();
  if (was_on != on) log.handed_out.clear();
  return was_on;
}

int64_t set_log_scope(int64_t scope) { return std::exchange(log_scope, scope); }

std::vector<LoggedCast> take_cast_log() {
  auto& log = the_log();
  const std::lock_guard lock(log.mutex);
  return std::exchange(log.casts, {});
}

}  // namespace amp_plugin
