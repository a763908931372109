// The tensors of an optimizer step, a row for each parameter, as memory without gaps.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

namespace amp_plugin {

constexpr size_t kMostStates = 3;

// As the ops take them: lists with an entry for each parameter, or empty.
struct StepTensors {
  at::TensorList params;
  at::TensorList grads;
  at::TensorList remainders;
  at::TensorList copies;
  std::array<at::TensorList, kMostStates> states;
};

// What holds a parameter: float32 alone, float32 and a 16-bit copy, or a bfloat16 with its remainder.
enum class Weight : uint8_t { fp32, fp32_and_half, fp32_and_bfloat16, bfloat16_pair };

// Whether the CPU steps such a gradient as it is: one in float32, or in the dtype that the model computes
// with. Torch makes no others, unless a parameter's grad_dtype asks for it. Those are widened first.
constexpr bool has_loop(at::ScalarType grad, Weight weight) {
  if (grad == at::kFloat) return true;
  if (weight == Weight::fp32) return false;
  return grad == (weight == Weight::fp32_and_half ? at::kHalf : at::kBFloat16);
}

struct Row {
  void* param;
  void* beside;  // the copy or the remainder
  const void* grad;
  std::array<float*, kMostStates> states;
  int64_t numel;
  at::ScalarType grad_type;
  Weight weight;
};

// Calls run(row, begin, end) for ranges of elements that together are all of all rows, on all threads.
using RunRange = c10::function_ref<void(size_t row, int64_t begin, int64_t end)>;
void for_each_range(const std::vector<Row>& rows, RunRange run);

// Rows of tensors that are checked. Where memory orders differ, a row is worked on in copies.
class StepRows {
 public:
  // `op` is named in errors; all tensors are to be on `device`.
  StepRows(const StepTensors& tensors, const char* op, c10::Device device = c10::kCPU);

  const std::vector<Row>& rows() const { return rows_; }

  // After the step: copies are written back, and versions counted.
  void finish() const;

 private:
  Row row_of(size_t i);
  void check(size_t i) const;
  const at::Tensor& flat(const at::Tensor& tensor, bool as_it_is, bool written);

  const StepTensors& tensors_;
  const char* op_;
  c10::Device device_;
  std::vector<Row> rows_;
  std::vector<at::Tensor> held_;
  std::vector<std::pair<at::Tensor, at::Tensor>> written_copies_;
};

}  // namespace amp_plugin
