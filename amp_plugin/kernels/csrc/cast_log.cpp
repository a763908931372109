#include "cast_log.h"

#include <torch/library.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

namespace amp_plugin {

std::atomic<bool> cast_log_on{false};

namespace {

// One cast is one op name and kFields numbers: argument, from, to, elements, cached, needs grad and
// leaf (a weight), scope (the module that runs), identity of the tensor.
constexpr size_t kFields = 8;

struct Log {
  std::mutex mutex;
  std::vector<std::string> ops;
  std::vector<int64_t> fields;
};

Log& the_log() {
  static auto* log = new Log;
  return *log;
}

thread_local int64_t scope = -1;

}  // namespace

void log_cast(const c10::OperatorName& op, size_t argument, const at::Tensor& from, c10::ScalarType to, bool cached) {
  auto& log = the_log();
  const std::lock_guard lock(log.mutex);
  log.ops.push_back(op.overload_name.empty() ? op.name : op.name + "." + op.overload_name);
  const bool weight = from.is_leaf() && from.requires_grad();
  log.fields.insert(
      log.fields.end(),
      {static_cast<int64_t>(argument), static_cast<int64_t>(from.scalar_type()), static_cast<int64_t>(to),
       from.numel(), cached, weight, scope, reinterpret_cast<int64_t>(from.unsafeGetTensorImpl())});
}

TORCH_LIBRARY_FRAGMENT(amp_plugin, library) {
  library.def("_log_casts(bool on) -> ()", [](bool on) { cast_log_on.store(on); });
  library.def("_cast_log_scope(int scope) -> int", [](int64_t wanted) {
    const int64_t previous = scope;
    scope = wanted;
    return previous;
  });
  library.def("_take_cast_log() -> (str[] ops, int[] fields)", []() {
    auto& log = the_log();
    const std::lock_guard lock(log.mutex);
    std::tuple<std::vector<std::string>, std::vector<int64_t>> taken{std::move(log.ops), std::move(log.fields)};
    log.ops.clear();
    log.fields.clear();
    return taken;
  });
}

}  // namespace amp_plugin
