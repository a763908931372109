// Our autocast kernel of one op on one device type. It casts the arguments as the rules in force for the op
// say, and then calls the op.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <atomic>
#include <optional>
#include <vector>

#include "region.h"
#include "rules_in_force.h"

namespace amp_plugin {

// The same numbers as OpRule in casting/rules.py. kNone (0) means that the rule set does not name the op.
enum class Rule : uint8_t {
  kNone,
  kLowerPrecision,
  kFp32,
  kFp32SetOptDtype,
  kFp32AppendDtype,
  kPromote,
  kBanned,
  kUnchanged,
};

c10::DispatchKey autocast_key(c10::DeviceType device);

// Return true if autocast may cast the tensor: it is floating point, not float64, and on the region's device.
bool is_eligible(const at::Tensor& tensor, c10::DeviceType device);

// Facts about an op at one autocast key. They never change.
struct OpFacts {
  c10::OperatorHandle op;
  c10::DeviceType device;
  c10::DispatchKey key;
  size_t argument_count;
  std::vector<size_t> tensors;  // positions of the arguments that hold tensors
  std::optional<size_t> dtype_argument;  // for fp32_set_opt_dtype
  std::optional<c10::OperatorHandle> dtype_overload;  // for fp32_append_dtype
  std::optional<c10::SafeKernelFunction> torch_kernel;
};

OpFacts facts_of(const c10::OperatorHandle& op, c10::DeviceType device);

// The entry of a kernel in a rule set: the rule in the low byte, and above it one bit for each argument that
// is never cast.
uint64_t entry_of(int rules, size_t kernel);

// Sets an entry. Only one thread may call this at a time. `kernels` is the total number of kernels.
void set_entry(int rules, size_t kernel, size_t kernels, uint64_t entry);

void forget_entries();

struct Call;

class AutocastKernel final : public c10::OperatorKernel {
 public:
  AutocastKernel(OpFacts facts, size_t number) : facts_(std::move(facts)), number_(number) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) const;

  const OpFacts& facts() const { return facts_; }
  // The entry of this kernel in the rules of the plan, or 0 if the plan follows no rules.
  uint64_t entry(const Plan& plan) const {
    return plan.course == Course::kFollowRules ? entry_of(plan.rules, number_) : 0;
  }

 private:
  void redispatch(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) const;
  void apply(Rule rule, const Call& call) const;
  bool first_is_eligible(const Call& call) const;
  void set_opt_dtype(const Call& call) const;
  void append_dtype(const Call& call) const;

  const OpFacts facts_;
  const size_t number_;
};

}  // namespace amp_plugin
