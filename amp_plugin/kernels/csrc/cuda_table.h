// The tables of tensors that launches work on: made from a list without Python, compared, uploaded.
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

// The rows of dense tensors.
// Raises ValueError or TypeError for what the kernels do not take.
struct Rows {
  std::vector<Row> rows;
  uint32_t count = 0;  // of tensors; a step has several rows for each
  uint32_t granules = 0;
};
Rows rows_of(at::TensorList tensors, c10::Device device);

// Whether tensors are what the rows were made of; false also where rows_of would raise, or copy first.
bool are_of(const Row* rows, const at::Tensor* const* tensors, size_t count, c10::Device device);
bool are_of(const Row* rows, at::TensorList tensors, c10::Device device);

// A table on the device. Its memory is given back when nobody holds it any more: a launch does until it is in
// its stream, though another thread's tables push this one out of the cache.
struct HeldTable {
  HeldTable(Memory& memory, const Rows& rows, Handle stream, bool of_graph, size_t most_blocks);
  ~HeldTable() { memory.give_back(block); }
  HeldTable(const HeldTable&) = delete;
  HeldTable& operator=(const HeldTable&) = delete;

  Memory& memory;
  const Handle stream;
  const std::vector<Row> rows;  // read while others look up tables
  const Memory::Block block;
  const Table table;
};
using SharedTable = std::shared_ptr<const HeldTable>;

// The tables of one device.
//
// A table is immutable once it is on the device, but for what kernels leave in it and take away again. It is
// looked up by the stream and its rows, so gradients that did not move upload nothing. As it belongs to one
// stream, its memory, and that of pinned rows, is used again only behind the kernels that read them.
class TableCache {
 public:
  TableCache(c10::Device device, uint32_t most_blocks) : device_(device), most_blocks_(most_blocks) {}

  // Before anything else fills the device: memory for tables.
  void reserve() { memory_.reserve(); }
  // For a launch on the stream; one that is captured gets a table that lives as long as its graph.
  SharedTable of(const Rows& rows, Handle stream, bool captured);
  // The one on the device of so many dense tensors that are read, or written in place, of which the first has
  // not moved; the caller compares the others. Null if there is none, or if somebody else is looking up a
  // table now, and may wait for the device.
  SharedTable kept(size_t count, const at::Tensor& first, Handle stream);
  int64_t uploads() const { return uploads_; }

 private:
  using Entries = std::list<SharedTable>;

  SharedTable for_graph(const Rows& rows, Handle stream);
  void upload(const HeldTable& held);
  SharedTable moved_to_front(Entries::iterator entry);

  c10::Device device_;
  uint32_t most_blocks_;
  std::mutex mutex_;
  Memory memory_;
  Entries entries_;  // the last used first
  std::atomic<int64_t> uploads_ = 0;
};

}  // namespace amp_plugin::cuda
