#include "step_rows.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <optional>

#include "tensor_memory.h"

namespace amp_plugin {
namespace {

// Elements that a thread processes at a time. They take about 50 us of memory traffic, much longer than
// starting and joining threads.
constexpr int64_t kStepTask = 65536;

}  // namespace

StepRows::StepRows(
    const StepTensors& tensors, const StepRule& rule, bool writes_gradients, c10::Device device)
    : tensors_(tensors), rule_(rule), writes_gradients_(writes_gradients), device_(device) {
  check_counts();
  rows_.reserve(tensors.params.size());
  for (size_t i = 0; i < tensors.params.size(); ++i) {
    check(i);
    rows_.push_back(row_of(i));
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

void StepRows::check(size_t i) const {
  const at::Tensor& param = tensors_.params[i];
  const bool pair = !tensors_.remainders.empty();
  const auto fits = [&](const at::Tensor& tensor, const char* name,
                        std::initializer_list<at::ScalarType> types) {
    TORCH_CHECK_VALUE(
        tensor.device() == device_ && tensor.layout() == at::kStrided && tensor.sizes() == param.sizes(),
        rule_.name, ": ", name, " ", i, " is of shape ", tensor.sizes(), ", layout ", tensor.layout(), " on ",
        tensor.device(), "; it must be a dense tensor on ", device_, " of its parameter's shape ",
        param.sizes(), ".");
    for (const at::ScalarType type : types) {
      if (tensor.scalar_type() == type) return;
    }
    TORCH_CHECK_TYPE(
        false, rule_.name, ": ", name, " ", i, " is of dtype ", tensor.scalar_type(),
        "; allowed here: ", c10::Join(", ", types), ".");
  };
  if (pair) {
    fits(param, "param", {at::kBFloat16});
    fits(tensors_.remainders[i], "remainder", {at::kShort});
  } else {
    fits(param, "param", {at::kFloat});
  }
  fits(tensors_.grads[i], "grad", {at::kFloat, at::kBFloat16, at::kHalf});
  const State format = format_of(i);
  for (size_t k = 0; k < rule_.states.size(); ++k) {
    if (rule_.states[k] == rules::kWeight) {
      fits(tensors_.state(k, i), "weight", {at::kFloat});
    } else if (format == State::codes) {
      check_codes(i, k);
    } else {
      fits(tensors_.state(k, i), "state", {at::kFloat, at::kBFloat16});
    }
  }
  for (size_t k = 0; k < rule_.counters; ++k) check_counter(i, k);
}

// Codes are stored in the order in which the parameter's elements lie in memory.
void StepRows::check_codes(size_t i, size_t k) const {
  const at::Tensor& param = tensors_.params[i];
  const bool ordered = param.is_non_overlapping_and_dense() &&
      (tensors_.remainders.empty() || same_memory_order(param, tensors_.remainders[i]));
  TORCH_CHECK_VALUE(
      ordered, rule_.name, ": param ", i, " of shape ", param.sizes(), " and strides ", param.strides(),
      " has states in 8-bit codes; it must be dense, and its remainder laid out as it is.");
  const int64_t bytes = state_bytes(State::codes, param.numel());
  const at::Tensor& state = tensors_.state(k, i);
  TORCH_CHECK_VALUE(
      state.device() == device_ && state.scalar_type() == at::kByte && state.is_contiguous() &&
          state.numel() == bytes && reinterpret_cast<uintptr_t>(state.const_data_ptr()) % 4 == 0,
      rule_.name, ": state ", i, " is of dtype ", state.scalar_type(), " and shape ", state.sizes(), " on ",
      state.device(), "; with others in codes it must be ", bytes, " contiguous bytes on ", device_,
      ", at a multiple of 4.");
}

// The first counter counts steps. The second one is a product that the rule computes in float32.
void StepRows::check_counter(size_t i, size_t k) const {
  const at::Tensor& counter = tensors_.counter(k, i);
  const at::ScalarType type = counter.scalar_type();
  TORCH_CHECK_VALUE(
      counter.device() == device_ && counter.numel() == 1 &&
          (type == at::kFloat || (k == 0 && type == at::kDouble)),
      rule_.name, ": a counter is of dtype ", type, " and shape ", counter.sizes(), " on ", counter.device(),
      "; it must be one float32 ", k == 0 ? "or float64 on " : "on ", device_,
      device_.is_cpu() ? "." : ", as fused=True and capturable=True make it.");
}

// The format of a parameter's states. Weights among the states do not count: they are always float32.
State StepRows::format_of(size_t i) const {
  std::optional<at::ScalarType> first;
  for (size_t k = 0; k < rule_.states.size(); ++k) {
    if (rule_.states[k] == rules::kWeight) continue;
    const at::ScalarType type = tensors_.state(k, i).scalar_type();
    TORCH_CHECK_TYPE(
        type == first.value_or(type), rule_.name, ": the states of param ", i, " are of dtypes ", *first,
        " and ", type, "; all of a parameter must be of one.");
    first = type;
  }
  if (first == at::kByte) return State::codes;
  return first == at::kBFloat16 ? State::bfloat16 : State::fp32;
}

// The gradient, converted if the device has no loop for its dtype.
at::Tensor StepRows::readable_grad(size_t i, Weight weight) const {
  const at::Tensor& grad = tensors_.grads[i];
  return device_.is_cpu() && !has_loop(grad.scalar_type(), weight) ? grad.to(at::kFloat) : grad;
}

void* StepRows::grad_memory(const at::Tensor& grad, const at::Tensor& readable) {
  if (!readable.is_same(grad)) {
    held_.push_back(readable);
    if (writes_gradients_) gradient_copies_.emplace_back(grad, readable);
  }
  return writes_gradients_ ? readable.mutable_data_ptr() : const_cast<void*>(readable.const_data_ptr());
}

const at::Tensor& StepRows::flat(const at::Tensor& tensor, bool as_it_is) {
  if (as_it_is) return tensor;
  held_.push_back(tensor.contiguous());
  if (!held_.back().is_same(tensor)) written_copies_.emplace_back(tensor, held_.back());
  return held_.back();
}

Row StepRows::row_of(size_t i) {
  const at::Tensor& param = tensors_.params[i];
  const at::Tensor* remainder = tensors_.remainders.empty() ? nullptr : &tensors_.remainders[i];
  Row row{};
  row.numel = param.numel();
  row.weight = remainder == nullptr ? Weight::fp32 : Weight::bfloat16_pair;
  row.format = format_of(i);
  const at::Tensor grad = readable_grad(i, row.weight);
  row.grad_type = grad.scalar_type();
  bool as_it_is =
      param.is_non_overlapping_and_dense() && (remainder == nullptr || same_memory_order(param, *remainder));
  for (size_t k = 0; k < rule_.states.size(); ++k) {
    row.are_weights[k] = rule_.states[k] == rules::kWeight;
    as_it_is =
        as_it_is && (row.format_of(k) == State::codes || same_memory_order(param, tensors_.state(k, i)));
  }
  row.param = flat(param, as_it_is).mutable_data_ptr();
  row.remainder = remainder == nullptr ? nullptr : flat(*remainder, as_it_is).mutable_data_ptr();
  row.grad = grad_memory(tensors_.grads[i], as_it_is ? ordered_as(grad, param) : grad.contiguous());
  for (size_t k = 0; k < rule_.states.size(); ++k)
    row.states[k] = flat(tensors_.state(k, i), as_it_is).mutable_data_ptr();
  return row;
}

void StepRows::finish_gradients() const {
  for (const auto& [grad, copy] : gradient_copies_) grad.copy_(copy);
  if (writes_gradients_) increment_versions(tensors_.grads);
}

void StepRows::finish() const {
  finish_gradients();
  for (const auto& [tensor, copy] : written_copies_) tensor.copy_(copy);
  for (const at::TensorList& written :
       {tensors_.params, tensors_.remainders, tensors_.states, tensors_.counters})
    increment_versions(written);
}

LastBlock::LastBlock(const Row& row, int64_t begin, int64_t count) : block_(row) {
  const int64_t grad = row.grad_type == at::kFloat ? sizeof(float) : sizeof(at::BFloat16);
  const int64_t param = row.weight == Weight::bfloat16_pair ? sizeof(at::BFloat16) : sizeof(float);
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

void LastBlock::write_back(Written written) const {
  for (size_t part = written.gradient ? 0 : 1; part < (written.rest ? kParts : 1); ++part) {
    if (parts_[part].bytes > 0) std::memcpy(parts_[part].outside, memory_[part], parts_[part].bytes);
  }
}

void for_each_range(const std::vector<Row>& rows, RunRange run) {
  struct Range {
    size_t row;
    int64_t begin;
    int64_t end;
  };
  constexpr int64_t kBlock = LastBlock::kMostElements;
  std::vector<Range> ranges;
  ranges.reserve(rows.size());
  std::vector<size_t> first{0};  // the first range of each task
  int64_t elements = 0;
  for (size_t row = 0; row < rows.size(); ++row) {
    for (int64_t begin = 0; begin < rows[row].numel;) {
      // Ranges end at whole blocks, so that loads stay aligned and each tensor has only one partial block.
      const int64_t room = (kStepTask - elements + kBlock - 1) / kBlock * kBlock;
      const int64_t end = std::min(rows[row].numel, begin + room);
      ranges.push_back({row, begin, end});
      elements += end - begin;
      begin = end;
      if (elements >= kStepTask) {
        first.push_back(ranges.size());
        elements = 0;
      }
    }
  }
  if (elements > 0) first.push_back(ranges.size());
  at::parallel_for(0, static_cast<int64_t>(first.size()) - 1, 1, [&](int64_t begin, int64_t end) {
    for (size_t i = first[begin]; i < first[end]; ++i) run(ranges[i].row, ranges[i].begin, ranges[i].end);
  });
}

}  // namespace amp_plugin
