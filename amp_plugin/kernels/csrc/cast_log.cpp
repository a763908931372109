#include "cast_log.h"

#include <c10/core/ScalarType.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/library.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace amp_plugin {

std::atomic<bool> cast_log_on{false};

namespace {

// Of each cast: the op, its device, dtype before, dtype after; then the numbers below.
struct Log {
  std::mutex mutex;
  std::vector<std::string> texts;
  std::vector<int64_t> numbers;
};

Log& the_log() {
  static auto* log = new Log;
  return *log;
}

thread_local int64_t scope = -1;

// Compilers trace with fake tensors: such a cast is part of a graph, it does not happen now.
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
  log.texts.insert(
      log.texts.end(),
      {op.name + "." + (op.overload_name.empty() ? "default" : op.overload_name),
       c10::DeviceTypeName(from.device().type(), /*lower_case=*/true), c10::toString(before),
       c10::toString(to)});
  log.numbers.insert(
      log.numbers.end(),
      {static_cast<int64_t>(argument), elements, cached ? 0 : bytes, cached,
       from.is_leaf() && from.requires_grad(), scope, reinterpret_cast<int64_t>(from.unsafeGetTensorImpl())});
}

namespace {

bool log_casts(bool on) { return cast_log_on.exchange(on); }

int64_t set_scope(int64_t wanted) { return std::exchange(scope, wanted); }

std::tuple<std::vector<std::string>, std::vector<int64_t>> take_log() {
  auto& log = the_log();
  const std::lock_guard lock(log.mutex);
  return {std::exchange(log.texts, {}), std::exchange(log.numbers, {})};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(amp_plugin, library) {
  library.def("_log_casts(bool on) -> bool", log_casts);
  library.def("_cast_log_scope(int scope) -> int", set_scope);
  library.def("_take_cast_log() -> (str[] texts, int[] numbers)", take_log);
}

}  // namespace amp_plugin
