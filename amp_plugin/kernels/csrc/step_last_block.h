// The elements behind the last whole block of a parameter, as a block of their own: the loops over elements,
// of which there is one for each rule and dtypes, then need no second form for them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "step_rows.h"

namespace amp_plugin {

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

}  // namespace amp_plugin
