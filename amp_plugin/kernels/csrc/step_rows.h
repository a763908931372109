// The tensors of an optimizer step, a row for each parameter, as memory without gaps.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <array>
#include <cstddef>
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
  std::array<at::TensorList, kMostStates> states;
};

// What holds a parameter: a float32, or a bfloat16 with its remainder.
enum class Weight : uint8_t { fp32, bfloat16_pair };

// Whether the CPU steps such a gradient as it is: one in float32, or in the dtype that the model computes
// with. Torch makes no others, unless a parameter's grad_dtype asks for it. Those are widened first.
constexpr bool has_loop(at::ScalarType grad, Weight weight) {
  return grad == at::kFloat || (grad == at::kBFloat16 && weight == Weight::bfloat16_pair);
}

// How a parameter's states are stored; see step_states.h.
enum class State : uint8_t { fp32, bfloat16, codes };

constexpr int64_t kCodeBlock = 128;  // elements with a unit of their own
constexpr int64_t kCodeBlockBytes = kCodeBlock + static_cast<int64_t>(sizeof(float));

// Bytes of the states of so many elements from the first of a block on; codes are of whole blocks.
constexpr int64_t state_bytes(State state, int64_t count) {
  if (state == State::codes) return (count + kCodeBlock - 1) / kCodeBlock * kCodeBlockBytes;
  return count * (state == State::bfloat16 ? 2 : 4);
}

struct Row {
  void* param;
  void* remainder;
  void* grad;
  std::array<void*, kMostStates> states;
  int64_t numel;
  int64_t offset;  // of its first element in the parameter
  at::ScalarType grad_type;
  Weight weight;
  State state;
};

// The elements behind the last whole block of a parameter, as a block of their own: the loops over elements,
// of which there is one for each rule and dtypes, then need no second form for them.
class LastBlock {
 public:
  static constexpr size_t kMostElements = kCodeBlock;

  // `count` elements of `row` from `begin` on, fewer than a block; behind them are zeros.
  LastBlock(const Row& row, int64_t begin, int64_t count);
  LastBlock(const LastBlock&) = delete;
  LastBlock& operator=(const LastBlock&) = delete;

  const Row& row() const { return block_; }

  // What a step changes, to where it came from; gradients are apart.
  void write_gradient_back() const { write_back(0); }
  void write_rest_back() const;

 private:
  struct Part {
    void* outside;
    size_t bytes;
  };
  static constexpr size_t kParts = 3 + kMostStates;  // gradient, parameter, remainder, states

  // Its part of memory with so many bytes of `data`; null where there are none.
  void* hold(size_t part, void* data, int64_t begin, int64_t bytes);
  void write_back(size_t part) const;

  alignas(64) std::byte memory_[kParts][kMostElements * sizeof(float)] = {};
  Part parts_[kParts] = {};
  Row block_;
};

// Calls run(row, begin, end) for ranges of elements that together are all of all rows, on all threads.
using RunRange = c10::function_ref<void(size_t row, int64_t begin, int64_t end)>;
void for_each_range(const std::vector<Row>& rows, RunRange run);

// Rows of tensors that are checked. Where memory orders differ, a row is worked on in copies.
class StepRows {
 public:
  // `op` is named in errors; all tensors are to be on `device`. Gradients may be written only if so said.
  StepRows(const StepTensors& tensors, const char* op, bool writes_gradients, c10::Device device = c10::kCPU);

  const std::vector<Row>& rows() const { return rows_; }

  // After the step: what was worked on in copies is written back, and versions are counted.
  void finish() const;
  // After a step that was skipped: the same for gradients alone.
  void finish_gradients() const;

 private:
  using Copies = std::vector<std::pair<at::Tensor, at::Tensor>>;

  Row row_of(size_t i);
  void check(size_t i) const;
  void check_codes(size_t i) const;
  State state_of(size_t i) const;
  at::Tensor readable_grad(size_t i, Weight weight) const;
  void* grad_memory(const at::Tensor& grad, const at::Tensor& readable);
  const at::Tensor& flat(const at::Tensor& tensor, bool as_it_is);

  const StepTensors& tensors_;
  const char* op_;
  bool writes_gradients_;
  c10::Device device_;
  std::vector<Row> rows_;
  std::vector<at::Tensor> held_;
  Copies written_copies_;
  Copies gradient_copies_;
};

}  // namespace amp_plugin
