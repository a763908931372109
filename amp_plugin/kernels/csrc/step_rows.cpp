#include "step_rows.h"

#include <ATen/MemoryOverlap.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>

#include "pieces.h"
#include "tensor_memory.h"

namespace amp_plugin {
namespace {

// The dtype of all states that are not weights. It determines their storage format.
at::ScalarType state_type(const ParameterTensors& given, const StepRule& rule) {
  for (size_t k = 0; k < rule.states.size(); ++k) {
    if (rule.states[k] != rules::kWeight) return given.states[k]->scalar_type();
  }
  return at::kFloat;
}

template <typename... Allowed>
std::string told(const char* what, const at::Tensor& tensor, const Allowed&... allowed) {
  return c10::str(
      what, "is ", tensor.scalar_type(), " of shape ", tensor.sizes(), ", layout ", tensor.layout(), ", on ",
      tensor.device(), "; it must be ", allowed...);
}

}  // namespace

std::string obstacle_of(const ParameterTensors& given, const StepRule& rule, c10::Device device) {
  const at::Tensor& param = *given.param;
  const at::Tensor* remainder = given.remainder;
  const auto fits = [&](const at::Tensor& tensor, std::initializer_list<at::ScalarType> types) {
    return is_plain(tensor) && tensor.device() == device && tensor.sizes() == param.sizes() &&
        std::ranges::find(types, tensor.scalar_type()) != types.end();
  };
  const auto unfit = [&](const char* what, const at::Tensor& tensor, const char* types) {
    return told(what, tensor, types, " of shape ", param.sizes(), ", dense, on ", device);
  };
  if (!fits(param, {remainder == nullptr ? at::kFloat : at::kBFloat16}))
    return unfit("", param, remainder == nullptr ? "float32" : "bfloat16, as it has a remainder,");
  if (remainder != nullptr && !fits(*remainder, {at::kShort}))
    return unfit("has a remainder that ", *remainder, "int16");
  if (!fits(*given.grad, {at::kFloat, at::kBFloat16, at::kHalf}) ||
      at::has_internal_overlap(*given.grad) == at::MemOverlap::Yes)
    return unfit("has a gradient that ", *given.grad, "float32, bfloat16 or float16");
  const at::ScalarType type = state_type(given, rule);
  const bool is_ordered =
      param.is_non_overlapping_and_dense() && (remainder == nullptr || same_memory_order(param, *remainder));
  if (type == at::kByte && !is_ordered)
    return "has states in 8-bit codes, so it must be dense, and its remainder must have the same strides";
  for (size_t k = 0; k < rule.states.size(); ++k) {
    const at::Tensor& state = *given.states[k];
    const bool is_weight = rule.states[k] == rules::kWeight;
    if (!is_weight && state.scalar_type() != type) return "has states of different dtypes";
    if (is_weight || type != at::kByte) {
      if (!fits(state, {at::kFloat, is_weight ? at::kFloat : at::kBFloat16}))
        return unfit("has a state that ", state, is_weight ? "float32" : "float32 or bfloat16");
      continue;
    }
    const int64_t bytes = state_bytes(State::codes, param.numel());
    if (state.device() != device || !state.is_contiguous() || state.numel() != bytes ||
        reinterpret_cast<uintptr_t>(state.const_data_ptr()) % 4 != 0)
      return told("has a state that ", state, bytes, " contiguous bytes on ", device, ", at a multiple of 4");
  }
  for (size_t k = 0; k < rule.counters; ++k) {
    const at::Tensor& counter = *given.counters[k];
    // The first counter counts steps. The second one is a product that the rule computes in float32.
    const bool is_right =
        counter.scalar_type() == at::kFloat || (k == 0 && counter.scalar_type() == at::kDouble);
    if (!is_right || counter.device() != device || counter.numel() != 1 || !is_plain(counter))
      return told(
          "has a step counter that ", counter, "one float32 ", k == 0 ? "or float64 on " : "on ", device,
          device.is_cpu() ? "" : ", as fused=True and capturable=True make it");
  }
  return {};
}

ParameterTensors StepLists::of(size_t i) const {
  ParameterTensors one{.param = &params[i], .grad = &grads[i]};
  if (!remainders.empty()) one.remainder = &remainders[i];
  for (size_t k = 0; k * params.size() < states.size(); ++k) one.states[k] = &states[k * params.size() + i];
  for (size_t k = 0; k * params.size() < counters.size(); ++k) one.counters[k] = &counter(k, i);
  return one;
}

StepRows::StepRows(const StepLists& tensors, const StepRule& rule, bool writes_gradients, c10::Device device)
    : tensors_(tensors), rule_(rule), writes_gradients_(writes_gradients), device_(device) {
  check_counts();
  rows_.reserve(tensors.params.size());
  for (size_t i = 0; i < tensors.params.size(); ++i) {
    const ParameterTensors given = tensors.of(i);
    const std::string obstacle = obstacle_of(given, rule, device);
    TORCH_CHECK_VALUE(obstacle.empty(), rule.name, ": parameter ", i, " ", obstacle, ".");
    rows_.push_back(row_of(given));
  }
}

void StepRows::check_counts() const {
  const size_t count = tensors_.params.size();
  const auto check_count = [&](at::TensorList list, size_t of_each, const char* name) {
    TORCH_CHECK_VALUE(
        list.size() == of_each * count, rule_.name, ": ", count, " params and ", list.size(), " ", name,
        "; give ", of_each, " for each parameter.");
  };
  check_count(tensors_.grads, 1, "grads");
  check_count(tensors_.states, rule_.states.size(), "states");
  check_count(tensors_.counters, rule_.counters, "counters");
  if (!tensors_.remainders.empty()) check_count(tensors_.remainders, 1, "remainders");
}

void* StepRows::memory_of(
    Copies& copies, const at::Tensor& tensor, const at::Tensor& like, at::ScalarType type) {
  if (tensor.scalar_type() == type && same_memory_order(tensor, like)) {
    const bool is_read = &copies == &gradient_copies_ && !writes_gradients_;
    return is_read ? const_cast<void*>(tensor.const_data_ptr()) : tensor.mutable_data_ptr();
  }
  copies.emplace_back(tensor, at::empty_like(like, type).copy_(tensor));
  return copies.back().second.mutable_data_ptr();
}

// The other tensors of a parameter are brought into the memory order of the parameter. A parameter with gaps
// is replaced by a dense copy.
Row StepRows::row_of(const ParameterTensors& given) {
  const at::Tensor& param = *given.param;
  const at::Tensor like = param.is_non_overlapping_and_dense() ? param : at::empty_like(param);
  const at::ScalarType type = state_type(given, rule_);
  Row row{};
  row.numel = param.numel();
  row.is_pair = given.remainder != nullptr;
  row.format = type == at::kByte ? State::codes : type == at::kBFloat16 ? State::bfloat16 : State::fp32;
  row.param = memory_of(written_copies_, param, like, param.scalar_type());
  if (row.is_pair) row.remainder = memory_of(written_copies_, *given.remainder, like, at::kShort);
  row.grad_type = given.grad->scalar_type();
  // The CPU has loops for gradients in float32 and in the dtype of the parameter. Torch makes gradients in
  // another dtype only if the parameter's grad_dtype asks for it. They are first converted to float32.
  if (device_.is_cpu() && row.grad_type != param.scalar_type()) row.grad_type = at::kFloat;
  row.grad = memory_of(gradient_copies_, *given.grad, like, row.grad_type);
  for (size_t k = 0; k < rule_.states.size(); ++k) {
    const at::Tensor& state = *given.states[k];
    row.are_weights[k] = rule_.states[k] == rules::kWeight;
    row.states[k] = row.format_of(k) == State::codes
        ? state.mutable_data_ptr()
        : memory_of(written_copies_, state, like, state.scalar_type());
  }
  return row;
}

void StepRows::for_each_piece(
    c10::function_ref<void(const Row& row, size_t i, int64_t begin, int64_t end)> run) const {
  std::vector<int64_t> numels;
  numels.reserve(rows_.size());
  for (const Row& row : rows_) numels.push_back(row.numel);
  amp_plugin::for_each_piece(
      numels, [&](size_t i, int64_t begin, int64_t end) { run(rows_[i], i, begin, end); });
}

void StepRows::finish() const {
  if (writes_gradients_) {
    for (const auto& [grad, copy] : gradient_copies_) grad.copy_(copy);
    increment_versions(tensors_.grads);
  }
  for (const auto& [tensor, copy] : written_copies_) tensor.copy_(copy);
  for (const at::TensorList& written :
       {tensors_.params, tensors_.remainders, tensors_.states, tensors_.counters})
    increment_versions(written);
}

LastBlock::LastBlock(const Row& row, int64_t begin, int64_t count) : block_(row) {
  const int64_t grad = row.grad_type == at::kFloat ? sizeof(float) : sizeof(at::BFloat16);
  const int64_t param = row.is_pair ? sizeof(at::BFloat16) : sizeof(float);
  const int64_t half = sizeof(int16_t);
  block_.grad = hold(0, row.grad, begin * grad, count * grad);
  block_.param = hold(1, row.param, begin * param, count * param);
  block_.remainder = hold(2, row.remainder, begin * half, count * half);
  block_.offset = row.offset + begin;
  for (size_t k = 0; k < kMostStates; ++k) {
    const State format = row.format_of(k);
    block_.states[k] = hold(3 + k, row.states[k], state_bytes(format, begin), state_bytes(format, count));
  }
}

void* LastBlock::hold(size_t part, void* data, int64_t begin, int64_t bytes) {
  if (data == nullptr) return nullptr;
  auto* from = static_cast<std::byte*>(data) + begin;
  parts_[part] = {from, static_cast<size_t>(bytes)};
  std::memcpy(memory_[part], from, parts_[part].bytes);
  return memory_[part];
}

void LastBlock::write_back(bool with_gradient) const {
  for (size_t part = with_gradient ? 0 : 1; part < kParts; ++part) {
    if (parts_[part].bytes > 0) std::memcpy(parts_[part].outside, memory_[part], parts_[part].bytes);
  }
}

}  // namespace amp_plugin
