#include "step_rows.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <optional>

#include "step_run.h"
#include "tensor_memory.h"

namespace amp_plugin {
namespace {

// Elements that a thread takes at a time: some 50 us of memory traffic, well above a fork and join.
constexpr int64_t kStepTask = 65536;

}  // namespace

StepRows::StepRows(const StepTensors& tensors, const char* op, bool writes_gradients, c10::Device device)
    : tensors_(tensors), op_(op), writes_gradients_(writes_gradients), device_(device) {
  const size_t count = tensors.params.size();
  const auto check_count = [&](at::TensorList list, const char* name, bool may_be_empty) {
    TORCH_CHECK_VALUE(
        list.size() == count || (may_be_empty && list.empty()), op, ": ", count, " params and ", list.size(),
        " ", name, "; give one for each parameter", may_be_empty ? ", or none at all." : ".");
  };
  check_count(tensors.grads, "grads", false);
  check_count(tensors.remainders, "remainders", true);
  for (const at::TensorList& states : tensors.states) {
    check_count(states, "tensors of a state", true);
  }
  rows_.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    check(i);
    rows_.push_back(row_of(i));
  }
}

void StepRows::check(size_t i) const {
  const at::Tensor& param = tensors_.params[i];
  const bool pair = !tensors_.remainders.empty();
  const auto fits = [&](const at::Tensor& tensor, const char* name,
                        std::initializer_list<at::ScalarType> types) {
    TORCH_CHECK_VALUE(
        tensor.device() == device_ && tensor.layout() == at::kStrided && tensor.sizes() == param.sizes(), op_,
        ": ", name, " ", i, " is of shape ", tensor.sizes(), ", layout ", tensor.layout(), " on ",
        tensor.device(), "; it must be a dense tensor on ", device_, " of its parameter's shape ",
        param.sizes(), ".");
    for (const at::ScalarType type : types) {
      if (tensor.scalar_type() == type) return;
    }
    TORCH_CHECK_TYPE(
        false, op_, ": ", name, " ", i, " is of dtype ", tensor.scalar_type(),
        "; allowed here: ", c10::Join(", ", types), ".");
  };
  if (pair) {
    fits(param, "param", {at::kBFloat16});
    fits(tensors_.remainders[i], "remainder", {at::kShort});
  } else {
    fits(param, "param", {at::kFloat});
  }
  fits(tensors_.grads[i], "grad", {at::kFloat, at::kBFloat16, at::kHalf});
  if (state_of(i) == State::codes) return check_codes(i);
  for (const at::TensorList& states : tensors_.states) {
    if (!states.empty()) fits(states[i], "state", {at::kFloat, at::kBFloat16});
  }
}

// Codes follow each other as the parameter's elements do in memory.
void StepRows::check_codes(size_t i) const {
  const at::Tensor& param = tensors_.params[i];
  const bool ordered = param.is_non_overlapping_and_dense() &&
      (tensors_.remainders.empty() || same_memory_order(param, tensors_.remainders[i]));
  TORCH_CHECK_VALUE(
      ordered, op_, ": param ", i, " of shape ", param.sizes(), " and strides ", param.strides(),
      " has states in 8-bit codes; it must be dense, and its remainder laid out as it is.");
  const int64_t bytes = state_bytes(State::codes, param.numel());
  for (const at::TensorList& states : tensors_.states) {
    if (states.empty()) continue;
    TORCH_CHECK_VALUE(
        states[i].device() == device_ && states[i].scalar_type() == at::kByte && states[i].is_contiguous() &&
            states[i].numel() == bytes && reinterpret_cast<uintptr_t>(states[i].const_data_ptr()) % 4 == 0,
        op_, ": state ", i, " is of dtype ", states[i].scalar_type(), " and shape ", states[i].sizes(),
        " on ", states[i].device(), "; with others in codes it must be ", bytes, " contiguous bytes on ",
        device_, ", at a multiple of 4.");
  }
}

// That of the first; the others are of the same dtype.
State StepRows::state_of(size_t i) const {
  std::optional<at::ScalarType> first;
  for (const at::TensorList& states : tensors_.states) {
    if (states.empty()) continue;
    const at::ScalarType type = states[i].scalar_type();
    TORCH_CHECK_TYPE(
        type == first.value_or(type), op_, ": the states of param ", i, " are of dtypes ", *first, " and ",
        type, "; all of a parameter must be of one.");
    first = type;
  }
  if (first == at::kByte) return State::codes;
  return first == at::kBFloat16 ? State::bfloat16 : State::fp32;
}

// The gradient, in a dtype that the device steps.
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
  const Weight weight = remainder == nullptr ? Weight::fp32 : Weight::bfloat16_pair;
  const at::Tensor grad = readable_grad(i, weight);
  const State state = state_of(i);
  bool as_it_is =
      param.is_non_overlapping_and_dense() && (remainder == nullptr || same_memory_order(param, *remainder));
  for (const at::TensorList& states : tensors_.states) {
    as_it_is = as_it_is && (states.empty() || state == State::codes || same_memory_order(param, states[i]));
  }
  Row row{};
  row.state = state;
  row.numel = param.numel();
  row.grad_type = grad.scalar_type();
  row.weight = weight;
  row.param = flat(param, as_it_is).mutable_data_ptr();
  row.remainder = remainder == nullptr ? nullptr : flat(*remainder, as_it_is).mutable_data_ptr();
  row.grad = grad_memory(tensors_.grads[i], as_it_is ? ordered_as(grad, param) : grad.contiguous());
  for (size_t k = 0; k < kMostStates; ++k) {
    if (!tensors_.states[k].empty()) row.states[k] = flat(tensors_.states[k][i], as_it_is).mutable_data_ptr();
  }
  return row;
}

void StepRows::finish_gradients() const {
  for (const auto& [grad, copy] : gradient_copies_) grad.copy_(copy);
  if (writes_gradients_) increment_versions(tensors_.grads);
}

void StepRows::finish() const {
  finish_gradients();
  for (const auto& [tensor, copy] : written_copies_) tensor.copy_(copy);
  increment_versions(tensors_.params);
  increment_versions(tensors_.remainders);
  for (const at::TensorList& states : tensors_.states) {
    increment_versions(states);
  }
}

LastBlock::LastBlock(const Row& row, int64_t begin, int64_t count) : block_(row) {
  const int64_t grad = row.grad_type == at::kFloat ? sizeof(float) : sizeof(at::BFloat16);
  const int64_t param = row.weight == Weight::bfloat16_pair ? sizeof(at::BFloat16) : sizeof(float);
  const int64_t half = sizeof(int16_t);
  block_.grad = hold(0, row.grad, begin * grad, count * grad);
  block_.param = hold(1, row.param, begin * param, count * param);
  block_.remainder = hold(2, row.remainder, begin * half, count * half);
  block_.offset = row.offset + begin;
  for (size_t i = 0; i < kMostStates; ++i) {
    block_.states[i] =
        hold(3 + i, row.states[i], state_bytes(row.state, begin), state_bytes(row.state, count));
  }
}

void* LastBlock::hold(size_t part, void* data, int64_t begin, int64_t bytes) {
  if (data == nullptr) return nullptr;
  auto* from = static_cast<std::byte*>(data) + begin;
  parts_[part] = {from, static_cast<size_t>(bytes)};
  std::memcpy(memory_[part], from, parts_[part].bytes);
  return memory_[part];
}

void LastBlock::write_back(size_t part) const {
  if (parts_[part].bytes > 0) std::memcpy(parts_[part].outside, memory_[part], parts_[part].bytes);
}

void LastBlock::write_rest_back() const {
  for (size_t part = 1; part < kParts; ++part) write_back(part);
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
  std::vector<size_t> first{0};  // of each task
  int64_t elements = 0;
  for (size_t row = 0; row < rows.size(); ++row) {
    for (int64_t begin = 0; begin < rows[row].numel;) {
      // Whole blocks, so that loads stay aligned and a tensor has one tail.
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

namespace {

template <typename Grad>
void divide_range(const Row row, int64_t begin, int64_t end, const Divisor divisor) {
  for (int64_t at = begin; at < end; at += Block::kSize) {
    auto* grads = static_cast<Grad*>(row.grad) + at;
    Block grad = load_block(grads);
    divide_block(grads, divisor, grad);
  }
}

void divide_elements(const Row& row, int64_t begin, int64_t end, const Divisor& divisor) {
  const auto divide = row.grad_type == at::kFloat ? divide_range<float> : divide_range<at::BFloat16>;
  const int64_t whole = begin + (end - begin) / Block::kSize * Block::kSize;
  divide(row, begin, whole, divisor);
  if (whole == end) return;
  LastBlock last(row, whole, end - whole);
  divide(last.row(), 0, Block::kSize, divisor);
  last.write_gradient_back();
}

}  // namespace

void divide_gradients(const StepRows& rows, const Divisor& divisor) {
  if (divisor.is_one()) return;
  for_each_range(rows.rows(), [&](size_t row, int64_t begin, int64_t end) {
    divide_elements(rows.rows()[row], begin, end, divisor);
  });
  rows.finish_gradients();
}

}  // namespace amp_plugin
