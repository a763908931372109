#include "autocast_kernel.h"

#include <ATen/ops/_to_copy_ops.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <array>

#include "cast_log.h"
#include "region_casts.h"
#include "torch_autocast.h"

namespace amp_plugin {

using c10::DeviceType;
using c10::DispatchKey;
using c10::IValue;
using c10::OperatorHandle;
using c10::ScalarType;
using torch::jit::Stack;

// The op call that is being autocast.
struct Call {
  const OperatorHandle& op;
  DeviceType device;
  const Plan& plan;
  uint64_t keep;  // bit i: argument i is never cast
  Stack* stack;
  size_t base;  // position of the first argument on the stack
  IValue& argument(size_t index) const { return (*stack)[base + index]; }
  bool casts(size_t index) const { return index >= 56 || ((keep >> index) & 1) == 0; }
};

namespace {

constexpr const char* kBannedBinaryCrossEntropy =
    "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
    "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
    "In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_logits\n"
    "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are\n"
    "safe to autocast.";

bool is_on(const at::Tensor& tensor, DeviceType device) {
  switch (device) {
    case DeviceType::CPU: return tensor.is_cpu() || tensor.is_mkldnn();
    case DeviceType::CUDA: return tensor.is_cuda() || tensor.is_xla();
    case DeviceType::XPU: return tensor.is_xpu();
    default: return tensor.is_mps();
  }
}

// Casts a tensor. The caller has excluded the autocast key, so autocast does not see this cast.
at::Tensor cast_tensor(const at::Tensor& tensor, ScalarType dtype) {
  return at::_ops::_to_copy::call(
      tensor, dtype, std::nullopt, std::nullopt, std::nullopt, false, std::nullopt);
}

// Returns the cast of a weight: the cast that the region has kept, or else a new one, which is kept if that
// is allowed. `cached` is set to whether a kept cast was found.
at::Tensor cast_weight(const at::Tensor& weight, ScalarType dtype, bool& cached) {
  at::Tensor kept = find_cast(weight, dtype);
  cached = kept.defined();
  if (cached) return kept;
  if (is_refilled(weight)) return cast_tensor(weight, dtype);
  // Record the cast for autograd even under no_grad: a later op in this region may need its gradient.
  const c10::AutoGradMode with_grad(true);
  at::Tensor cast = cast_tensor(weight, dtype);
  keep_cast(weight, cast);
  return cast;
}

at::Tensor cast_argument(const at::Tensor& tensor, ScalarType dtype, size_t index, const Call& call) {
  at::Tensor cast;
  bool cached = false;
  if (call.plan.keeper == Keeper::kTorch) {
    cast = at::autocast::cached_cast(dtype, tensor, call.device);
    cached = is_logging_casts() && is_weight(tensor) && was_logged(cast);
  } else if (
      call.plan.keeper == Keeper::kRegion && is_weight(tensor) &&
      dtype == at::autocast::get_autocast_dtype(call.device) && may_keep(call.device)) {
    cast = cast_weight(tensor, dtype, cached);
  } else {
    cast = cast_tensor(tensor, dtype);
  }
  if (is_logging_casts()) log_cast(call.op.operator_name(), index, tensor, dtype, cached);
  return cast;
}

bool needs_cast(const IValue& value, ScalarType dtype, DeviceType device) {
  if (!value.isTensor()) return false;
  const at::Tensor& tensor = value.toTensor();
  return is_eligible(tensor, device) && tensor.scalar_type() != dtype;
}

// For arguments of type Tensor[] and Tensor?[]. A new list is made only if an element has to be cast.
void cast_list(IValue& value, ScalarType dtype, size_t index, const Call& call) {
  const c10::ArrayRef<IValue> given = value.toListRef();
  const auto needed = [&](const IValue& item) { return needs_cast(item, dtype, call.device); };
  if (std::none_of(given.begin(), given.end(), needed)) return;
  c10::impl::GenericList result(value.toList().elementType());
  result.reserve(given.size());
  for (const IValue& item : given) {
    result.push_back(needed(item) ? IValue(cast_argument(item.toTensor(), dtype, index, call)) : item);
  }
  value = IValue(std::move(result));
}

void cast_arguments(const Call& call, const std::vector<size_t>& arguments, ScalarType dtype) {
  for (const size_t index : arguments) {
    if (!call.casts(index)) continue;
    IValue& value = call.argument(index);
    if (needs_cast(value, dtype, call.device)) {
      value = cast_argument(value.toTensor(), dtype, index, call);
    } else if (value.isList()) {
      cast_list(value, dtype, index, call);
    }
  }
}

// Returns float32 if the eligible arguments have different dtypes, else their common dtype. If no argument is
// eligible, returns the dtype of the region.
//
// Torch starts from the region's dtype. If a region in bfloat16 gets a float16 argument, or the other way
// round, torch raises an error. We return float32 there, because float16 and bfloat16 both promote to it.
ScalarType widest_dtype(const Call& call, const std::vector<size_t>& arguments) {
  ScalarType widest = ScalarType::Undefined;
  const auto see = [&](const IValue& value) {
    if (!value.isTensor() || !is_eligible(value.toTensor(), call.device)) return;
    const ScalarType dtype = value.toTensor().scalar_type();
    widest = widest == ScalarType::Undefined || widest == dtype ? dtype : ScalarType::Float;
  };
  for (const size_t index : arguments) {
    const IValue& value = call.argument(index);
    see(value);
    if (value.isList()) std::ranges::for_each(value.toListRef(), see);
  }
  return widest == ScalarType::Undefined ? at::autocast::get_autocast_dtype(call.device) : widest;
}

bool holds_tensors(const c10::TypePtr& type) {
  if (const auto optional = type->cast<c10::OptionalType>()) return holds_tensors(optional->getElementType());
  if (const auto list = type->cast<c10::ListType>()) return holds_tensors(list->getElementType());
  return type->kind() == c10::TypeKind::TensorType;
}

bool takes_dtype_after(const c10::FunctionSchema& with_dtype, const c10::FunctionSchema& schema) {
  const auto& longer = with_dtype.arguments();
  const auto& shorter = schema.arguments();
  if (longer.size() != shorter.size() + 1 || longer.back().name() != "dtype") return false;
  return std::equal(shorter.begin(), shorter.end(), longer.begin(), [](const auto& a, const auto& b) {
    return a.name() == b.name();
  });
}

std::optional<OperatorHandle> find_dtype_overload(const OperatorHandle& op) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const char* overload : {"ScalarOpt_dtype", "ScalarOpt_dim_dtype", "dtype", "dim_dtype"}) {
    const auto candidate = dispatcher.findSchema({op.operator_name().name, overload});
    if (candidate.has_value() && takes_dtype_after(candidate->schema(), op.schema())) return candidate;
  }
  return std::nullopt;
}

[[noreturn]] void refuse(const Call& call) {
  const auto& name = call.op.operator_name();
  TORCH_CHECK(name.name != "aten::binary_cross_entropy", kBannedBinaryCrossEntropy);
  TORCH_CHECK(
      false, "The autocast rules in force ban ", name,
      ". Give it another rule, or run it on float32 inputs in a region with enabled=False.");
}

}  // namespace

DispatchKey autocast_key(DeviceType device) {
  switch (device) {
    case DeviceType::CPU: return DispatchKey::AutocastCPU;
    case DeviceType::CUDA: return DispatchKey::AutocastCUDA;
    case DeviceType::XPU: return DispatchKey::AutocastXPU;
    case DeviceType::MPS: return DispatchKey::AutocastMPS;
    default: TORCH_CHECK(false, "amp_plugin has no autocast rules for device type ", device, ".");
  }
}

bool is_eligible(const at::Tensor& tensor, DeviceType device) {
  return tensor.defined() && is_on(tensor, device) && tensor.is_floating_point() &&
      tensor.scalar_type() != ScalarType::Double;
}

OpFacts facts_of(const OperatorHandle& op, DeviceType device) {
  const DispatchKey key = autocast_key(device);
  OpFacts facts{.op = op, .device = device, .key = key, .argument_count = op.schema().arguments().size()};
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (holds_tensors(arguments[i].real_type())) facts.tensors.push_back(i);
    if (arguments[i].name() == "dtype") facts.dtype_argument = i;
  }
  facts.dtype_overload = find_dtype_overload(op);
  if (op.hasKernelForDispatchKey(key)) facts.torch_kernel = op.getComputedKernelForDispatchKey(key);
  return facts;
}

namespace {

using Entries = std::vector<std::atomic<uint64_t>>;
std::array<std::atomic<Entries*>, kMaxRuleSets> rule_sets;  // zero-initialised

}  // namespace

uint64_t entry_of(int rules, size_t kernel) {
  const Entries* entries = rule_sets[static_cast<size_t>(rules)].load(std::memory_order_acquire);
  if (entries == nullptr || kernel >= entries->size()) return 0;
  return (*entries)[kernel].load(std::memory_order_acquire);
}

void set_entry(int rules, size_t kernel, size_t kernels, uint64_t entry) {
  auto& set = rule_sets[static_cast<size_t>(rules)];
  Entries* entries = set.load(std::memory_order_acquire);
  if (entries == nullptr || kernel >= entries->size()) {
    auto* larger =
        // the old array is not freed: other threads may be reading it
        new Entries(std::max(2 * kernel, kernels) + 1);
    for (size_t i = 0; entries != nullptr && i < entries->size(); ++i) (*larger)[i] = (*entries)[i].load();
    set.store(entries = larger, std::memory_order_release);
  }
  (*entries)[kernel].store(entry, std::memory_order_release);
}

void forget_entries() {
  for (auto& set : rule_sets) set.store(nullptr, std::memory_order_release);
}

void AutocastKernel::operator()(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) const {
  const Plan plan = plan_for(facts_.device);
  if (plan.course == Course::kTorchKernel && facts_.torch_kernel.has_value())
    return facts_.torch_kernel->callBoxed(op, keys, stack);
  const uint64_t entry = this->entry(plan);
  const auto rule = static_cast<Rule>(entry & 0xff);
  // No rule applies to this op. Each op that it calls inside follows its own rule, as if this op had no
  // autocast kernel.
  if (rule == Rule::kNone) return redispatch(op, keys, stack);
  const c10::impl::ExcludeDispatchKeyGuard below_autocast(facts_.key);
  const size_t base = stack->size() - facts_.argument_count;
  const Call call{op, facts_.device, plan, entry >> 8, stack, base};
  if (rule == Rule::kFp32AppendDtype) return append_dtype(call);
  apply(rule, call);
  op.callBoxed(stack);
}

void AutocastKernel::redispatch(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) const {
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, facts_.key), stack);
}

void AutocastKernel::apply(Rule rule, const Call& call) const {
  switch (rule) {
    case Rule::kNone:
    case Rule::kUnchanged: return;
    case Rule::kLowerPrecision:
      return cast_arguments(call, facts_.tensors, at::autocast::get_autocast_dtype(facts_.device));
    case Rule::kFp32: return cast_arguments(call, facts_.tensors, ScalarType::Float);
    case Rule::kPromote: return cast_arguments(call, facts_.tensors, widest_dtype(call, facts_.tensors));
    case Rule::kFp32SetOptDtype: return set_opt_dtype(call);
    default: return refuse(call);
  }
}

bool AutocastKernel::first_is_eligible(const Call& call) const {
  if (facts_.tensors.empty()) return false;
  const IValue& first = call.argument(facts_.tensors.front());
  return first.isTensor() && is_eligible(first.toTensor(), facts_.device);
}

void AutocastKernel::set_opt_dtype(const Call& call) const {
  if (!first_is_eligible(call)) return;
  if (!facts_.dtype_argument.has_value()) return cast_arguments(call, facts_.tensors, ScalarType::Float);
  IValue& dtype = call.argument(*facts_.dtype_argument);
  if (dtype.isNone()) dtype = IValue(ScalarType::Float);
}

void AutocastKernel::append_dtype(const Call& call) const {
  const IValue& first = call.argument(facts_.tensors.front());
  const auto dtype = first_is_eligible(call) ? ScalarType::Float : first.toTensor().scalar_type();
  call.stack->emplace_back(dtype);
  facts_.dtype_overload->callBoxed(call.stack);
}

}  // namespace amp_plugin
