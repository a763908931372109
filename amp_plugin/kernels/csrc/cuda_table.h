// The tables of tensors that launches work on: made from a list without Python, compared, uploaded.
#pragma once

#include <ATen/core/Tensor.h>

#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "cuda_memory.h"

namespace amp_plugin::cuda {

// These three as in cuda/tensor_table.cuh, which says what they mean.
struct alignas(16) Row {
  uint64_t address;
  uint64_t out_address;
  uint64_t numel;
  uint32_t first_granule;
  uint8_t dtype;
  uint8_t out_dtype;
  uint16_t unused;
};
static_assert(sizeof(Row) == 32);

struct alignas(16) Partial {
  double total;
  uint32_t bits;
  uint32_t unused;
};

struct Table {
  Address rows;
  Address marks;
  Address partials;
  Address ticket;
  uint32_t count;
  uint32_t granules;

  uint32_t blocks(uint32_t most) const { return granules < 1 ? 1 : granules < most ? granules : most; }
};

constexpr uint32_t kGranuleBytes = 4096, kGranuleElements = 1024;
constexpr uint8_t kUnknownDtype = 255, kLastCastable = 3;

uint8_t code_of(at::ScalarType type);

// The rows of dense tensors; `out` is empty or, for a cast, as long as `tensors`.
// Raises ValueError or TypeError for what the kernels do not take.
struct Rows {
  std::vector<Row> rows;
  uint32_t count = 0;  // of tensors; a step has several rows for each
  uint32_t granules = 0;
};
Rows rows_of(at::TensorList tensors, at::TensorList out, c10::Device device);

// Whether tensors are what the rows were made of; false also where rows_of would raise, or copy first.
bool are_of(const Row* rows, const at::Tensor* const* tensors, size_t count, c10::Device device);
bool are_of(const Row* rows, at::TensorList tensors, c10::Device device);

using KeptRows = std::shared_ptr<const std::vector<Row>>;
struct KeptTable {
  KeptRows rows;  // read while others look up tables
  Table table;
};

// The tables of one device.
//
// A table is immutable once it is on the device, but for what kernels leave in it and take away again. It is
// looked up by the stream and its rows, so gradients that did not move upload nothing. As it belongs to one
// stream, its memory, and that of pinned rows, is used again only behind the kernels that read them.
class TableCache {
 public:
  TableCache(c10::Device device, uint32_t most_blocks) : device_(device), most_blocks_(most_blocks) {}

  // For a launch on the stream; one that is captured gets a table that lives as long as its graph.
  Table of(const Rows& rows, Handle stream, bool captured);
  // The one on the device of so many dense tensors that are read, or written in place, of which the first has
  // not moved; the caller compares the others. None if there is none, or if somebody else is looking up a
  // table now, and may wait for the device.
  std::optional<KeptTable> kept(size_t count, const at::Tensor& first, Handle stream);
  int64_t uploads() const { return uploads_; }

 private:
  struct Entry {
    Handle stream;
    KeptRows rows;
    Memory::Block memory;
    Table table;
  };

  Table laid_out(const Rows& rows, Address begin) const;
  size_t bytes_of(const Rows& rows) const;
  Table for_graph(const Rows& rows, Handle stream);
  void upload(const Rows& rows, const Table& table);
  const Entry* find(const Rows& rows, Handle stream);

  c10::Device device_;
  uint32_t most_blocks_;
  std::mutex mutex_;
  std::list<Entry> entries_;  // the last used first
  Memory memory_;
  std::atomic<int64_t> uploads_ = 0;
};

}  // namespace amp_plugin::cuda
