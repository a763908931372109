// The tables of tensors that kernels work on. C++ code makes them from lists of tensors, compares them with
// earlier tables, and uploads them.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda_layout.h"
#include "cuda_memory.h"

namespace amp_plugin::cuda {

constexpr u8 kUnknownDtype = 255;

u8 code_of(at::ScalarType type);

// The rows of a list of dense tensors. rows_of() raises ValueError or TypeError for tensors that the kernels
// cannot work on.
struct Rows {
  std::vector<Row> rows;
  uint32_t count;  // number of tensors; a step has several rows per tensor
  uint32_t granules = 0;

  explicit Rows(size_t tensors, size_t rows_per_tensor = 1)
      : rows(tensors * rows_per_tensor), count(static_cast<uint32_t>(tensors)) {}
  // Gives the next `taken` granules to the row.
  void give(Row& row, uint64_t taken);
};
Rows rows_of(at::TensorList tensors, c10::Device device);

// Returns true if the rows were made from these tensors. False also for tensors that rows_of() would reject
// or copy.
bool are_of(const Row* rows, at::TensorList tensors, c10::Device device);

// A table on the device. Its memory is given back when nobody refers to it any more. A launch refers to it
// until the launch is in its stream, so another thread that evicts the table from the cache does no harm.
struct HeldTable {
  HeldTable(Memory& memory, const Rows& rows, Handle stream, bool of_graph, size_t most_blocks);
  ~HeldTable() { memory.give_back(block); }
  HeldTable(const HeldTable&) = delete;
  HeldTable& operator=(const HeldTable&) = delete;

  Memory& memory;
  const std::vector<Row> rows;  // const: other threads read it without the lock
  const Memory::Block block;
  const Table table;
};
using SharedTable = std::shared_ptr<const HeldTable>;

// The tables of one device.
//
// A table does not change once it is on the device, except for results that kernels store in it and clear
// again. A table is looked up by its stream and its rows, so nothing is uploaded if no gradient has moved.
// Each table belongs to one stream. Its memory, and the pinned memory of its rows, is therefore reused only
// after the kernels that read it.
class TableCache {
 public:
  TableCache(c10::Device device, uint32_t most_blocks) : device_(device), most_blocks_(most_blocks) {}

  // Allocates memory for tables, before the device is full.
  void reserve() { memory_.reserve(); }
  // Returns the table for a launch on the stream. If the launch is captured, the table lives as long as the
  // graph.
  SharedTable of(const Rows& rows, Handle stream, bool captured);
  // Returns a table on the device that has `count` dense tensors and whose first tensor is `first`. The
  // caller compares the others. Returns null if there is none. Also returns null if another thread holds the
  // lock: that thread may be waiting for the device.
  SharedTable kept(size_t count, const at::Tensor& first, Handle stream);
  int64_t uploads() const { return uploads_; }

 private:
  SharedTable for_graph(const Rows& rows, Handle stream);
  void upload(const HeldTable& held);
  // Returns the first table that fits and moves it to the front, or returns null.
  template <typename Fits>
  SharedTable find(const Fits& fits);

  c10::Device device_;
  uint32_t most_blocks_;
  std::mutex mutex_;
  Memory memory_;
  std::list<SharedTable> entries_;  // most recently used first
  std::atomic<int64_t> uploads_ = 0;
};

}  // namespace amp_plugin::cuda
