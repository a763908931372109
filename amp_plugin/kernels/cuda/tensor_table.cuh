// The table of tensors of one launch, and the parts of tensors that each block works on.
//
// Each tensor is cut into granules of equal size. The start of a tensor costs several trips to memory. If
// tensors are measured or multiplied, each tensor therefore counts as kGranulesOfTensor more granules than it
// has. So a block with many small tensors gets fewer bytes.
//
// The launch has as many blocks as the device runs at once, and they share all granules evenly. A block takes
// one run of granules, which may begin in one tensor and end in another. Granules begin at multiples of 16
// bytes of the *address*. So all accesses are aligned 16-byte accesses, except at the two ends of a tensor.
#pragma once

#include "elements.cuh"

namespace amp_plugin::cuda {

// Tuning parameters. __init__.py defines them as macros.
constexpr u32 kBlocksPerMultiprocessor = BLOCKS_PER_MULTIPROCESSOR;
constexpr u32 kInFlight = IN_FLIGHT;  // 16-byte loads a thread issues before it uses the first
constexpr u32 kFullWarp = 0xffffffffu;

// Finds the row of a granule: the last row that begins at or before it.
//
// All threads of the block search together, kThreads rows per round. A round is one trip to memory, and 256
// tensors need one round.
__device__ inline u32 row_of_granule(const Row* rows, u32 count, u32 granule) {
  u32 low = 0, size = count;
  while (size > 1) {
    const u32 step = (size + kThreads - 1) / kThreads;
    const u32 offset = threadIdx.x * step;
    const bool at_or_before = offset < size && rows[low + offset].first_granule <= granule;
    const u32 last = u32(__syncthreads_count(at_or_before)) - 1;  // thread 0 always votes true
    low += last * step;
    size = size - last * step < step ? size - last * step : step;
  }
  return low;
}

// Calls `visit(row, tensor, begin, end)` for each run of granules of one tensor that belongs to this block.
template <typename Visit>
__device__ void for_each_piece(const Table& table, Visit&& visit) {
  u32 granule = u32(u64(table.granules) * blockIdx.x / gridDim.x);
  const u32 end = u32(u64(table.granules) * (blockIdx.x + 1) / gridDim.x);
  if (granule == end) return;
  for (u32 tensor = row_of_granule(table.rows, table.count, granule); granule < end; ++tensor) {
    const Row row = table.rows[tensor];
    const u32 next = tensor + 1 < table.count ? table.rows[tensor + 1].first_granule : table.granules;
    const u32 stop = next < end ? next : end;
    if (granule >= stop) continue;  // an empty tensor
    visit(row, tensor, granule - row.first_granule, stop - row.first_granule);
    granule = stop;
  }
}

// Returns true to all threads of the block that comes last. All threads of all blocks must call it.
//
// That block then sees everything that the other blocks wrote before. One thread counts for its whole block.
// The barrier before the count makes the writes of all its threads part of what it releases. The barrier
// after the count passes what it acquires on to all threads.
__device__ inline bool comes_last(u32* ticket) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    last = count_block(ticket) == gridDim.x - 1;
    if (last) *ticket = 0;
  }
  __syncthreads();
  return last;
}

// A run of bytes: first single elements, then whole vectors, then single elements.
struct Span {
  u64 begin, vectors_begin, vectors_end, end;  // addresses
};

__device__ inline Span span_of_piece(u64 address, u64 bytes, u32 begin_granule, u32 end_granule) {
  const u64 first = address & ~u64(15);
  const u64 piece_begin = first + u64(begin_granule) * kGranuleBytes;
  const u64 piece_end = first + u64(end_granule) * kGranuleBytes;
  const u64 end = address + bytes;  // a tensor's last granules may begin after its end
  Span span;
  span.begin = piece_begin < address ? address : piece_begin < end ? piece_begin : end;
  span.end = piece_end < end ? piece_end : end;
  span.vectors_begin = (span.begin + 15) & ~u64(15);
  span.vectors_end = span.end & ~u64(15);
  if (span.vectors_begin > span.vectors_end) span.vectors_begin = span.vectors_end = span.end;
  return span;
}

// Calls `visit` for a span:
//
// - `visit.vectors<kWhole>(address, valid)` for groups of kInFlight vectors. Vector k of a thread is at
//   address[k * kThreads] and exists if k < valid. In a whole group all of them exist, so it tests none. In
//   any other group, `visit` must set the missing vectors to 0; uninitialized ones would be carried along in
//   registers.
// - `visit.unit(address)` for each run of `unit_bytes` outside the vectors: an element, or a complex pair.
template <typename T, typename Visit>
__device__ void for_each_in_span(const Span& span, u32 unit_bytes, Visit&& visit) {
  auto* vectors = reinterpret_cast<Vector<T>*>(span.vectors_begin) + threadIdx.x;
  const u32 count = u32((span.vectors_end - span.vectors_begin) / 16);
  constexpr u32 kGroup = kThreads * kInFlight;
  u32 start = 0;
  for (; start + kGroup <= count; start += kGroup) visit.template vectors<true>(vectors + start, kInFlight);
  if (start + threadIdx.x < count)
    visit.template vectors<false>(vectors + start, (count - start - threadIdx.x + kThreads - 1) / kThreads);
  const u32 head = u32((span.vectors_begin - span.begin) / unit_bytes);
  const u32 tail = u32((span.end - span.vectors_end) / unit_bytes);
  for (u32 unit = threadIdx.x; unit < head + tail; unit += kThreads) {
    const u64 address =
        unit < head ? span.begin + unit * unit_bytes : span.vectors_end + (unit - head) * unit_bytes;
    visit.unit(reinterpret_cast<T*>(address));
  }
}

}  // namespace amp_plugin::cuda
