// The tensors of an optimizer step, a row for each parameter, as memory without gaps.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "cuda_layout.h"
#include "step_rules.h"

namespace amp_plugin {

using cuda::kMostStates;

// As the op takes them: lists with an entry for each parameter. All first states come first, then all second
// ones; counters likewise. Remainders may be empty.
struct StepTensors {
  at::TensorList params;
  at::TensorList grads;
  at::TensorList states;
  at::TensorList counters;
  at::TensorList remainders;

  const at::Tensor& state(size_t k, size_t i) const { return states[k * params.size() + i]; }
  const at::Tensor& counter(size_t k, size_t i) const { return counters[k * params.size() + i]; }
};

// What holds a parameter: a float32, or a bfloat16 with its remainder.
enum class Weight : uint8_t { fp32, bfloat16_pair };

// Whether the CPU steps such a gradient as it is: one in float32, or in the dtype that the model computes
// with. Torch makes no others, unless a parameter's grad_dtype asks for it. Those are widened first.
constexpr bool has_loop(at::ScalarType grad, Weight weight) {
  return grad == at::kFloat || (grad == at::kBFloat16 && weight == Weight::bfloat16_pair);
}

// How a state is stored; see step_states.h.
enum class State : uint8_t { fp32, bfloat16, codes };

constexpr int64_t kCodeBlock = cuda::kCodeBlock;
constexpr int64_t kCodeBlockBytes = cuda::kCodeBlockBytes;

// Bytes of a state of so many elements from the first of a block on; codes are of whole blocks.
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
  State format;  // of the states that are no weights
  std::array<bool, kMostStates> are_weights;  // which are float32

  State format_of(size_t k) const { return are_weights[k] ? State::fp32 : format; }
};

// The elements behind the last whole block of a parameter, as a block of their own: the loops over elements
// then need no second form for them.
class LastBlock {
 public:
  static constexpr size_t kMostElements = kCodeBlock;

  // `count` elements of `row` from `begin` on, fewer than a block; behind them are zeros.
  LastBlock(const Row& row, int64_t begin, int64_t count);
  LastBlock(const LastBlock&) = delete;
  LastBlock& operator=(const LastBlock&) = delete;

  const Row& row() const { return block_; }

  struct Written {
    bool gradient;
    bool rest;
  };

  // To where it came from.
  void write_back(Written written) const;

 private:
  struct Part {
    void* outside;
    size_t bytes;
  };
  static constexpr size_t kParts = 3 + kMostStates;  // gradient, parameter, remainder, states

  // Its part of memory with so many bytes of `data`; null where there are none.
  void* hold(size_t part, void* data, int64_t begin, int64_t bytes);

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
  // All tensors are to be on `device`. Gradients may be written only if so said.
  StepRows(const StepTensors& tensors, const StepRule& rule, bool writes_gradients, c10::Device device);

  const std::vector<Row>& rows() const { return rows_; }

  // After the step: what was worked on in copies is written back, and versions are counted.
  void finish() const;
  // After a step that was skipped: the same for gradients alone.
  void finish_gradients() const;

 private:
  using Copies = std::vector<std::pair<at::Tensor, at::Tensor>>;

  Row row_of(size_t i);
  void check_counts() const;
  void check(size_t i) const;
  void check_codes(size_t i, size_t k) const;
  void check_counter(size_t i, size_t k) const;
  State format_of(size_t i) const;
  at::Tensor readable_grad(size_t i, Weight weight) const;
  void* grad_memory(const at::Tensor& grad, const at::Tensor& readable);
  const at::Tensor& flat(const at::Tensor& tensor, bool as_it_is);

  const StepTensors& tensors_;
  const StepRule& rule_;
  bool writes_gradients_;
  c10::Device device_;
  std::vector<Row> rows_;
  std::vector<at::Tensor> held_;
  Copies written_copies_;
  Copies gradient_copies_;
};

}  // namespace amp_plugin
