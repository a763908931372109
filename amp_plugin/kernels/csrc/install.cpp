// Registers the autocast kernels with the dispatcher, and takes them back.
#include <torch/library.h>

#include <map>
#include <mutex>

#include "autocast_kernel.h"
#include "list_kernel.h"
#include "region_casts.h"

namespace amp_plugin {
namespace {

using c10::DeviceType;
using c10::DispatchKey;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

// An op that may write a weight through an alias (`weight.data.clamp_()`): no version counter of the
// weight moves, so the casts of that storage are forgotten here.
class WatchKernel final : public c10::OperatorKernel {
 public:
  WatchKernel(const OperatorHandle& op, DispatchKey key) : key_(key) {
    const auto& arguments = op.schema().arguments();
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto* alias = arguments[i].alias_info();
      if (alias != nullptr && alias->isWrite()) written_.push_back(arguments.size() - i);
    }
  }

  void operator()(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    for (const size_t from_end : written_) {
      const IValue& written = (*stack)[stack->size() - from_end];
      if (written.isTensor()) {
        note_write(written.toTensor());
      } else if (written.isTensorList()) {
        for (const at::Tensor& tensor : written.toTensorVector()) note_write(tensor);
      }
    }
    op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, key_), stack);
  }

 private:
  const DispatchKey key_;
  std::vector<size_t> written_;  // arguments, counted from the end of the stack
};

// Dispatcher warns that a kernel is overridden; here that is the purpose.
class NoWarnings final : public c10::WarningHandler {
  void process(const c10::Warning& /*warning*/) override {}
};

class Installation {
 public:
  // Never destroyed: the dispatcher may be gone before it.
  static Installation& get() {
    static auto* installation = new Installation;
    return *installation;
  }

  void set_rule(DeviceType device, int number, const std::string& op_name, uint64_t entry) {
    const std::lock_guard lock(mutex_);
    const size_t kernel =
        numbers_.try_emplace({op_name, autocast_key(device)}, numbers_.size()).first->second;
    set_entry(number, kernel, numbers_.size(), entry);
    register_kernel(op_name, device, kernel);
  }

  void watch(DeviceType device, const std::string& op_name) {
    const std::lock_guard lock(mutex_);
    const auto op = find(op_name);
    if (!op.has_value() || op->hasKernelForDispatchKey(autocast_key(device))) return;
    const auto key = autocast_key(device);
    add(op_name, key, c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<WatchKernel>(*op, key)));
  }

  void uninstall() {
    const std::lock_guard lock(mutex_);
    handles_.clear();
    forget_entries();
  }

  std::vector<std::string> installed(DeviceType device) {
    const std::lock_guard lock(mutex_);
    std::vector<std::string> names;
    for (const auto& [where, handle] : handles_) {
      if (where.second == autocast_key(device)) names.push_back(where.first);
    }
    return names;
  }

 private:
  using Where = std::pair<std::string, DispatchKey>;

  static std::optional<OperatorHandle> find(const std::string& full) {
    const auto dot = full.find('.');
    const auto overload = dot == std::string::npos ? "" : full.substr(dot + 1);
    return c10::Dispatcher::singleton().findSchema({full.substr(0, dot), overload});
  }

  void register_kernel(const std::string& op_name, DeviceType device, size_t kernel) {
    const auto key = autocast_key(device);
    if (handles_.count({op_name, key}) != 0) return;
    const auto op = find(op_name);
    TORCH_CHECK(op.has_value(), "amp_plugin: no op ", op_name, " is registered.");
    add(op_name, key, kernel_for(AutocastKernel(facts_of(*op, device), kernel)));
  }

  void add(const std::string& op_name, DispatchKey key, c10::KernelFunction kernel) {
    NoWarnings handler;
    const c10::WarningUtils::WarningHandlerGuard quiet(&handler);
    const auto op = find(op_name);
    handles_.emplace(
        Where{op_name, key},
        c10::Dispatcher::singleton().registerImpl(
            op->operator_name(), key, std::move(kernel), std::nullopt, nullptr, "amp_plugin"));
  }

  std::mutex mutex_;
  std::map<Where, size_t> numbers_;
  std::map<Where, c10::RegistrationHandleRAII> handles_;
};

DeviceType device_named(std::string_view name) { return c10::Device(std::string(name)).type(); }

void set_rules(
    std::string_view device, int64_t number, const std::vector<std::string>& ops, at::IntArrayRef rules,
    at::IntArrayRef keep) {
  TORCH_CHECK(
      number >= 0 && number < kMaxRuleSets, "amp_plugin: rule set number ", number, " is out of range.");
  for (size_t i = 0; i < ops.size(); ++i) {
    const auto entry = static_cast<uint64_t>(rules[i]) | (static_cast<uint64_t>(keep[i]) << 8);
    Installation::get().set_rule(device_named(device), static_cast<int>(number), ops[i], entry);
  }
}

void watch_writes(std::string_view device, const std::vector<std::string>& ops) {
  for (const auto& op : ops) Installation::get().watch(device_named(device), op);
}

void set_defaults(std::string_view device, int64_t number) {
  set_default_rules(device_named(device), static_cast<int>(number));
}

void uninstall() { Installation::get().uninstall(); }

std::vector<std::string> installed(std::string_view device) {
  return Installation::get().installed(device_named(device));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(amp_plugin, library) {
  library.def("_set_rules(str device, int number, str[] ops, int[] rules, int[] keep) -> ()", set_rules);
  library.def("_watch_writes(str device, str[] ops) -> ()", watch_writes);
  library.def("_set_default_rules(str device, int number) -> ()", set_defaults);
  library.def("_innermost_regions() -> int[]", innermost_regions);
  library.def("_uninstall() -> ()", uninstall);
  library.def("_installed(str device) -> str[]", installed);
  library.def("_kept_cast_count() -> int", kept_cast_count);
}

}  // namespace amp_plugin
