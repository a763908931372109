// Registers the autocast kernels with the dispatcher and removes them again. Also registers the CPU ops.
#include "install.h"

#include <ATen/core/IListRef.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/ops/cat_ops.h>
#include <ATen/ops/stack_ops.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>
#include <torch/library.h>

#include <map>
#include <mutex>

#include "autocast_kernel.h"
#include "cpu_ops.h"

namespace amp_plugin {
namespace {

using c10::DeviceType;
using c10::DispatchKey;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

// Unboxed kernels for ops that take a list of tensors. Boxing copies the list, which would take long compared
// with cat and stack themselves. Op is at::_ops::cat or at::_ops::stack; List is the type of its list
// argument.
template <typename Op, typename List>
class ListKernel final : public c10::OperatorKernel {
 public:
  explicit ListKernel(AutocastKernel kernel) : kernel_(std::move(kernel)) {}

  at::Tensor operator()(c10::DispatchKeySet keys, List tensors, int64_t dim) {
    const OpFacts& facts = kernel_.facts();
    const Plan plan = plan_for(facts.device);
    const auto rule = plan.course == Course::kFollowRules
        ? static_cast<Rule>(kernel_.entry(plan.rules) & 0xff)
        : Rule::kNone;
    if (rule == Rule::kPromote && has_one_dtype(tensors, facts.device)) {
      const c10::impl::ExcludeDispatchKeyGuard below_autocast(facts.key);
      return Op::call(tensors, dim);
    }
    return boxed(keys, tensors, dim);
  }

 private:
  // Return true if all eligible tensors have the same dtype. Then promotion casts nothing.
  static bool has_one_dtype(const List& tensors, c10::DeviceType device) {
    auto first = c10::ScalarType::Undefined;
    for (const at::Tensor& tensor : tensors) {
      if (!is_eligible(tensor, device)) continue;
      if (first != c10::ScalarType::Undefined && first != tensor.scalar_type()) return false;
      first = tensor.scalar_type();
    }
    return true;
  }

  at::Tensor boxed(c10::DispatchKeySet keys, const List& tensors, int64_t dim) const {
    c10::List<at::Tensor> list;
    list.reserve(tensors.size());
    for (const at::Tensor& tensor : tensors) list.push_back(tensor);
    torch::jit::Stack stack{std::move(list), dim};
    kernel_(kernel_.facts().op, keys, &stack);
    return std::move(stack.back()).toTensor();
  }

  const AutocastKernel kernel_;
};

template <typename Op, typename List>
c10::KernelFunction unboxed(AutocastKernel kernel) {
  using Kernel = ListKernel<Op, List>;
  return c10::KernelFunction::makeFromUnboxedFunctor<false, Kernel>(
      std::make_unique<Kernel>(std::move(kernel)));
}

// The kernel in the form that the dispatcher takes: unboxed for cat and stack, boxed for all other ops.
c10::KernelFunction kernel_for(AutocastKernel kernel) {
  const auto& name = kernel.facts().op.operator_name();
  if (name.overload_name.empty() && name.name == "aten::cat") {
    return unboxed<at::_ops::cat, const at::ITensorListRef&>(std::move(kernel));
  }
  if (name.overload_name.empty() && name.name == "aten::stack") {
    return unboxed<at::_ops::stack, at::TensorList>(std::move(kernel));
  }
  return c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<AutocastKernel>(std::move(kernel)));
}

// The dispatcher warns when a kernel is overridden. Here overriding is the purpose, so the warning is
// dropped.
class NoWarnings final : public c10::WarningHandler {
  void process(const c10::Warning& /*warning*/) override {}
};

class Installation {
 public:
  // Never destroyed: at exit the dispatcher may be destroyed first.
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

  void uninstall() {
    const std::lock_guard lock(mutex_);
    handles_.clear();
    forget_entries();
  }

 private:
  using Where = std::pair<std::string, DispatchKey>;

  void register_kernel(const std::string& op_name, DeviceType device, size_t kernel) {
    const auto key = autocast_key(device);
    if (handles_.count({op_name, key}) != 0) return;
    const auto op = c10::Dispatcher::singleton().findSchema(torch::jit::parseName(op_name));
    TORCH_CHECK(op.has_value(), "amp_plugin: no op ", op_name, " is registered.");
    NoWarnings handler;
    const c10::WarningUtils::WarningHandlerGuard quiet(&handler);
    handles_.emplace(
        Where{op_name, key},
        c10::Dispatcher::singleton().registerImpl(
            op->operator_name(), key, kernel_for(AutocastKernel(facts_of(*op, device), kernel)), std::nullopt,
            nullptr, "amp_plugin"));
  }

  std::mutex mutex_;
  std::map<Where, size_t> numbers_;
  std::map<Where, c10::RegistrationHandleRAII> handles_;
};

DeviceType device_named(const std::string& name) { return c10::Device(name).type(); }

}  // namespace

void set_rules(
    const std::string& device, int number, const std::vector<std::string>& ops,
    const std::vector<uint64_t>& entries) {
  TORCH_CHECK(
      number >= 0 && number < kMaxRuleSets, "amp_plugin: rule set number ", number, " is out of range.");
  for (size_t i = 0; i < ops.size(); ++i) {
    Installation::get().set_rule(device_named(device), number, ops[i], entries[i]);
  }
}

void uninstall() { Installation::get().uninstall(); }

TORCH_LIBRARY_IMPL(amp_plugin, CPU, m) {
  m.impl("norm_check", norm_check);
  m.impl("unscale_", unscale_);
  m.impl("multiply_", multiply_);
  m.impl("step_", step_);
  m.impl("pack_weights_", pack_weights_);
  m.impl("unpack_weights_", unpack_weights_);
  m.impl("round_weights_", round_weights_);
}

}  // namespace amp_plugin
