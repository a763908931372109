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
    const auto rule = static_cast<Rule>(kernel_.entry(plan_for(facts.device)) & 0xff);
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

// The registered kernels. A kernel keeps its number after uninstall().
struct Installation {
  using Where = std::pair<std::string, DispatchKey>;  // an op, and the autocast key of a device
  std::mutex mutex;
  std::map<Where, size_t> numbers;
  std::map<Where, c10::RegistrationHandleRAII> handles;
};

// Never destroyed: at exit the dispatcher may be destroyed first.
Installation& installation() {
  static auto* installation = new Installation;
  return *installation;
}

c10::RegistrationHandleRAII registered(const std::string& op_name, DeviceType device, size_t kernel) {
  const auto op = c10::Dispatcher::singleton().findSchema(torch::jit::parseName(op_name));
  TORCH_CHECK(op.has_value(), "amp_plugin: no op ", op_name, " is registered.");
  NoWarnings handler;
  const c10::WarningUtils::WarningHandlerGuard quiet(&handler);
  return c10::Dispatcher::singleton().registerImpl(
      op->operator_name(), autocast_key(device), kernel_for(AutocastKernel(facts_of(*op, device), kernel)),
      std::nullopt, nullptr, "amp_plugin");
}

}  // namespace

void set_rules(
    const std::string& device_name, int number, const std::vector<std::string>& ops,
    const std::vector<uint64_t>& entries) {
  TORCH_CHECK(
      number >= 0 && number < kMaxRuleSets, "amp_plugin: rule set number ", number, " is out of range.");
  const DeviceType device = c10::Device(device_name).type();
  auto& [mutex, numbers, handles] = installation();
  const std::lock_guard lock(mutex);
  for (size_t i = 0; i < ops.size(); ++i) {
    const Installation::Where where{ops[i], autocast_key(device)};
    const size_t kernel = numbers.try_emplace(where, numbers.size()).first->second;
    set_entry(number, kernel, numbers.size(), entries[i]);
    if (!handles.contains(where)) handles.emplace(where, registered(ops[i], device, kernel));
  }
}

void uninstall() {
  const std::lock_guard lock(installation().mutex);
  installation().handles.clear();
  forget_entries();
}

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
