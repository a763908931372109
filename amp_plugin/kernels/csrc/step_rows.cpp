#include "step_rows.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <initializer_list>

#include "memory_order.h"
#include "step_last_block.h"

namespace amp_plugin {
namespace {

// Elements that a thread takes at a time: some 50 us of memory traffic, well above a fork and join.
constexpr int64_t kStepTask = 65536;

Weight weight_of(const at::Tensor& param, const at::Tensor* copy, bool pair) {
  if (pair) return Weight::bfloat16_pair;
  if (copy == nullptr) return Weight::fp32;
  return copy->scalar_type() == at::kHalf ? Weight::fp32_and_half : Weight::fp32_and_bfloat16;
}

void bump(at::TensorList tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.is_inference()) {
      tensor.unsafeGetTensorImpl()->bump_version();
    }
  }
}

}  // namespace

StepRows::StepRows(const StepTensors& tensors, const char* op, c10::Device device)
    : tensors_(tensors), op_(op), device_(device) {
  const size_t count = tensors.params.size();
  const auto check_count = [&](at::TensorList list, const char* name, bool may_be_empty) {
    TORCH_CHECK_VALUE(
        list.size() == count || (may_be_empty && list.empty()), op, ": ", count, " params and ", list.size(),
        " ", name, "; give one for each parameter", may_be_empty ? ", or none at all." : ".");
  };
  check_count(tensors.grads, "grads", false);
  check_count(tensors.remainders, "remainders", true);
  check_count(tensors.copies, "copies", true);
  for (const at::TensorList& states : tensors.states) {
    check_count(states, "tensors of a state", true);
  }
  TORCH_CHECK_VALUE(
      tensors.remainders.empty() || tensors.copies.empty(), op,
      ": remainders and copies are both given; a bfloat16 parameter has a remainder, a float32 one may have "
      "a copy.");
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
  if (!tensors_.copies.empty()) fits(tensors_.copies[i], "copy", {at::kHalf, at::kBFloat16});
  fits(tensors_.grads[i], "grad", {at::kFloat, at::kBFloat16, at::kHalf});
  for (const at::TensorList& states : tensors_.states) {
    if (!states.empty()) fits(states[i], "state", {at::kFloat});
  }
}

const at::Tensor& StepRows::flat(const at::Tensor& tensor, bool as_it_is, bool written) {
  if (as_it_is) return tensor;
  held_.push_back(tensor.contiguous());
  if (written && !held_.back().is_same(tensor)) written_copies_.emplace_back(tensor, held_.back());
  return held_.back();
}

Row StepRows::row_of(size_t i) {
  const at::Tensor& param = tensors_.params[i];
  const at::Tensor* beside = nullptr;
  if (!tensors_.remainders.empty()) beside = &tensors_.remainders[i];
  if (!tensors_.copies.empty()) beside = &tensors_.copies[i];
  const Weight weight =
      weight_of(param, tensors_.copies.empty() ? nullptr : beside, !tensors_.remainders.empty());
  const at::Tensor* grad = &tensors_.grads[i];
  at::Tensor widened;
  if (device_.is_cpu() && !has_loop(grad->scalar_type(), weight)) {
    widened = grad->to(at::kFloat);
    held_.push_back(widened);
    grad = &widened;
  }
  bool as_it_is = param.is_non_overlapping_and_dense() && same_memory_order(param, *grad) &&
      (beside == nullptr || same_memory_order(param, *beside));
  for (const at::TensorList& states : tensors_.states) {
    as_it_is = as_it_is && (states.empty() || same_memory_order(param, states[i]));
  }
  Row row{};
  row.numel = param.numel();
  row.grad_type = grad->scalar_type();
  row.weight = weight;
  row.param = flat(param, as_it_is, true).mutable_data_ptr();
  row.beside = beside == nullptr ? nullptr : flat(*beside, as_it_is, true).mutable_data_ptr();
  row.grad = flat(*grad, as_it_is, false).const_data_ptr();
  for (size_t state = 0; state < kMostStates; ++state) {
    if (tensors_.states[state].empty()) continue;
    row.states[state] = flat(tensors_.states[state][i], as_it_is, true).mutable_data_ptr<float>();
  }
  return row;
}

void StepRows::finish() const {
  for (const auto& [tensor, copy] : written_copies_) {
    tensor.copy_(copy);
  }
  bump(tensors_.params);
  bump(tensors_.remainders);
  bump(tensors_.copies);
  for (const at::TensorList& states : tensors_.states) {
    bump(states);
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

}  // namespace amp_plugin
