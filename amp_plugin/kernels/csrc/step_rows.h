// The tensors of an optimizer step as memory without gaps, with one row per parameter.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cuda_layout.h"
#include "step_rules.h"

namespace amp_plugin {

using cuda::kMostCounters;
using cuda::kMostStates;

// The tensors of one parameter in a step. The remainder is null if the parameter has none.
struct ParameterTensors {
  const at::Tensor* param;
  const at::Tensor* grad;
  const at::Tensor* remainder = nullptr;
  std::array<const at::Tensor*, kMostStates> states{};
  std::array<const at::Tensor*, kMostCounters> counters{};
};

// Returns why the op cannot step a parameter on this device, such as "has a gradient that is ...". Returns an
// empty text if it can.
std::string obstacle_of(const ParameterTensors& given, const StepRule& rule, c10::Device device);

// The lists that the op takes. `params`, `grads` and `remainders` have one tensor per parameter; `remainders`
// may be empty. `states` has the first states of all parameters, then the second states of all, and so on.
// `counters` likewise.
struct StepLists {
  at::TensorList params;
  at::TensorList grads;
  at::TensorList states;
  at::TensorList counters;
  at::TensorList remainders;

  const at::Tensor& counter(size_t k, size_t i) const { return counters[k * params.size() + i]; }
  ParameterTensors of(size_t i) const;
};

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
  void* remainder;  // null if the parameter is not a pair
  void* grad;
  std::array<void*, kMostStates> states;
  int64_t numel;
  int64_t offset;  // position of the row's first element in the parameter
  at::ScalarType grad_type;
  bool is_pair;  // the parameter is bfloat16 with a remainder; otherwise it is float32
  State format;  // of all states that are not weights
  std::array<bool, kMostStates> are_weights;  // true for states that are weights; they are float32

  State format_of(size_t k) const { return are_weights[k] ? State::fp32 : format; }
};

// A copy of the elements after the last whole block of a parameter, filled up to a whole block. So the loops
// over elements have to handle whole blocks only.
class LastBlock {
 public:
  static constexpr size_t kMostElements = kCodeBlock;

  // Copies `count` elements of `row`, from `begin` on. They are fewer than a block, and the rest of the block
  // is filled with zeros.
  LastBlock(const Row& row, int64_t begin, int64_t count);
  LastBlock(const LastBlock&) = delete;
  LastBlock& operator=(const LastBlock&) = delete;

  const Row& row() const { return block_; }

  // Copies the elements back to the row.
  void write_back(bool with_gradient) const;

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

// The rows of a step's tensors, which are checked. The step works on copies of tensors that are not in the
// memory order of their parameter.
class StepRows {
 public:
  // All tensors must be on `device`. Gradients may be written only if `writes_gradients`.
  StepRows(const StepLists& tensors, const StepRule& rule, bool writes_gradients, c10::Device device);

  const std::vector<Row>& rows() const { return rows_; }
  // Calls run(row, i, begin, end) for pieces that together cover all elements of all rows, on all threads.
  void for_each_piece(
      c10::function_ref<void(const Row& row, size_t i, int64_t begin, int64_t end)> run) const;

  // Call after the step. Copies are written back, and version counters are increased.
  void finish() const;

 private:
  using Copies = std::vector<std::pair<at::Tensor, at::Tensor>>;

  void check_counts() const;
  Row row_of(const ParameterTensors& given);
  // Returns a tensor's memory if it has this dtype and the memory order of `like`, else that of a copy.
  void* memory_of(Copies& copies, const at::Tensor& tensor, const at::Tensor& like, at::ScalarType type);

  const StepLists& tensors_;
  const StepRule& rule_;
  bool writes_gradients_;
  c10::Device device_;
  std::vector<Row> rows_;
  // tensors that are not used directly, and their copies
  Copies written_copies_;
  Copies gradient_copies_;
};

}  // namespace amp_plugin
