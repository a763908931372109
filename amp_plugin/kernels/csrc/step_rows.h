// The tensors of an optimizer step as memory without gaps, with one row per parameter.
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

// The lists that the op takes. `params`, `grads` and `remainders` have one tensor per parameter; `remainders`
// may be empty. `states` has the first states of all parameters, then the second states of all, and so on.
// `counters` likewise.
struct StepTensors {
  at::TensorList params;
  at::TensorList grads;
  at::TensorList states;
  at::TensorList counters;
  at::TensorList remainders;

  const at::Tensor& state(size_t k, size_t i) const { return states[k * params.size() + i]; }
  const at::Tensor& counter(size_t k, size_t i) const { return counters[k * params.size() + i]; }
};

// How a parameter is stored: as float32, or as bfloat16 with a remainder.
enum class Weight : uint8_t { fp32, bfloat16_pair };

// Return true if the CPU has a loop for this gradient: one in float32, or in the dtype that the model
// computes with. Torch makes gradients in another dtype only if the parameter's grad_dtype asks for it. Such
// a gradient is first converted to float32.
constexpr bool has_loop(at::ScalarType grad, Weight weight) {
  return grad == at::kFloat || (grad == at::kBFloat16 && weight == Weight::bfloat16_pair);
}

// How a state is stored; see step_states.h.
enum class State : uint8_t { fp32, bfloat16, codes };

constexpr int64_t kCodeBlock = cuda::kCodeBlock;
constexpr int64_t kCodeBlockBytes = cuda::kCodeBlockBytes;

// The number of bytes of `count` elements of a state, counted from the start of a block. Codes are stored in
// whole blocks.
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
  int64_t offset;  // position of the row's first element in the parameter
  at::ScalarType grad_type;
  Weight weight;
  State format;  // of all states that are not weights
  std::array<bool, kMostStates> are_weights;  // true for states that are weights; they are float32

  State format_of(size_t k) const { return are_weights[k] ? State::fp32 : format; }
};

// The elements after the last whole block of a parameter, copied into a block of their own. So the loops over
// elements only ever see whole blocks.
class LastBlock {
 public:
  static constexpr size_t kMostElements = kCodeBlock;

  // Copies `count` elements of `row`, from `begin` on. They are fewer than a block, and the rest of the block
  // is filled with zeros.
  LastBlock(const Row& row, int64_t begin, int64_t count);
  LastBlock(const LastBlock&) = delete;
  LastBlock& operator=(const LastBlock&) = delete;

  const Row& row() const { return block_; }

  struct Written {
    bool gradient;
    bool rest;
  };

  // Copies the elements back to the row.
  void write_back(Written written) const;

 private:
  struct Part {
    void* outside;
    size_t bytes;
  };
  static constexpr size_t kParts = 3 + kMostStates;  // gradient, parameter, remainder, states

  // Copies `bytes` bytes of `data` into this part's memory, and returns that memory. Returns null if `data`
  // is null.
  void* hold(size_t part, void* data, int64_t begin, int64_t bytes);

  alignas(64) std::byte memory_[kParts][kMostElements * sizeof(float)] = {};
  Part parts_[kParts] = {};
  Row block_;
};

// Calls run(row, begin, end) for ranges that together cover all elements of all rows. Uses all threads.
using RunRange = c10::function_ref<void(size_t row, int64_t begin, int64_t end)>;
void for_each_range(const std::vector<Row>& rows, RunRange run);

// The rows of a step's tensors, which are checked. If the tensors of a row differ in memory order, the step
// works on copies.
class StepRows {
 public:
  // All tensors must be on `device`. Gradients may be written only if `writes_gradients`.
  StepRows(const StepTensors& tensors, const StepRule& rule, bool writes_gradients, c10::Device device);

  const std::vector<Row>& rows() const { return rows_; }

  // Call after the step. Copies are written back, and version counters are increased.
  void finish() const;
  // Call this instead of finish() after a skipped step. It does the same for the gradients only.
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
