#include "list_kernel.h"

#include <ATen/core/IListRef.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/ops/cat_ops.h>
#include <ATen/ops/stack_ops.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace amp_plugin {
namespace {

// Op is at::_ops::cat or at::_ops::stack, List its list of tensors.
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
  // Then promotion has nothing to cast.
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

}  // namespace

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

}  // namespace amp_plugin
