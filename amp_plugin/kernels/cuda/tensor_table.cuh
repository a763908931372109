// The table of tensors of one launch, and which pieces of which tensors a block works on.
//
// Each tensor is cut into granules of equal size. As many blocks as the device runs at once share all
// granules evenly: a block takes one run of them, which may begin within one tensor and end within
// another. Granules begin at multiples of 16 bytes of the *address*, so that all accesses but those at
// the two ends of a tensor are aligned 16-byte accesses, wherever the tensor begins.
#pragma once

#include "elements.cuh"

namespace amp_plugin {

constexpr u32 kThreads = 256;
constexpr u32 kBlocksPerMultiprocessor = 4;  // as in catalogue.py
constexpr u32 kInFlight = 4;  // 16-byte loads a thread issues before it uses the first
constexpr u32 kFullWarp = 0xffffffffu;
constexpr u32 kGranuleBytes = 4096;
constexpr u32 kGranuleElements = 1024;  // of a cast

// Laid out as in csrc/cuda_table.h, as are Partial and Table.
struct alignas(16) Row {
  u64 address;
  u64 out_address;  // cast only
  u64 numel;
  u32 first_granule;  // ascending; an empty tensor shares its successor's
  DType dtype;
  DType out_dtype;  // cast only
  u16 unused;
};

// What one block found.
struct alignas(16) Partial {
  double total;
  u32 bits;
  u32 unused;
};

struct Table {
  const Row* rows;
  u32* marks;  // one for each tensor, 0 before and after each launch
  Partial* partials;  // one for each block
  u32* ticket;  // 0 before and after each launch
  u32 count;
  u32 granules;
};

// Find the row of a granule: the last one that begins at or before it.
//
// Every warp looks for itself, 32 rows a round: two rounds for 1000 tensors, and no barrier.
__device__ inline u32 row_of_granule(const Row* rows, u32 count, u32 granule) {
  const u32 lane = threadIdx.x % 32;
  u32 low = 0, size = count;
  while (size > 1) {
    const u32 step = (size + 31) / 32;
    const u32 offset = lane * step;
    const bool at_or_before = offset < size && rows[low + offset].first_granule <= granule;
    const u32 last = __popc(__ballot_sync(kFullWarp, at_or_before)) - 1;  // lane 0 always votes
    low += last * step;
    size = size - last * step < step ? size - last * step : step;
  }
  return low;
}

// Call `visit(row, tensor, begin, end)` for each run of granules of a tensor that this block works on.
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

// Tell all threads of the block that comes here last; called by all threads of all blocks.
//
// What any thread of another block wrote before is seen after it. The fences stand between the barriers and
// the count, and one thread's serve its block: the barrier makes what the others wrote a part of what it
// releases, and what it acquires theirs.
__device__ inline bool comes_last(u32* ticket) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(ticket, 1u) == gridDim.x - 1;
    __threadfence();
    if (last) *ticket = 0;
  }
  __syncthreads();
  return last;
}

// A run of bytes: scalars, then whole vectors, then scalars.
struct Span {
  u64 begin, vectors_begin, vectors_end, end;  // addresses
};

__device__ inline Span span_of_piece(u64 address, u64 bytes, u32 begin_granule, u32 end_granule) {
  const u64 first = address & ~u64(15);
  const u64 piece_begin = first + u64(begin_granule) * kGranuleBytes;
  const u64 piece_end = first + u64(end_granule) * kGranuleBytes;
  Span span;
  span.begin = piece_begin < address ? address : piece_begin;
  span.end = piece_end < address + bytes ? piece_end : address + bytes;
  span.vectors_begin = (span.begin + 15) & ~u64(15);
  span.vectors_end = span.end & ~u64(15);
  if (span.vectors_begin > span.vectors_end) span.vectors_begin = span.vectors_end = span.end;
  return span;
}

// Call `visit.vectors(address, valid)` for groups of kInFlight vectors, vector k of a thread at
// address[k * kThreads] and present while k < valid (a visit sets the others to 0: left as they are they
// would be carried from piece to piece in registers), and `visit.unit(address)` for each run of
// `unit_bytes` (an element, or a complex pair) outside the vectors.
template <typename T, typename Visit>
__device__ void for_each_in_span(const Span& span, u32 unit_bytes, Visit&& visit) {
  auto* vectors = reinterpret_cast<Vector<T>*>(span.vectors_begin);
  const u32 count = u32((span.vectors_end - span.vectors_begin) / 16);
  for (u32 start = threadIdx.x; start < count; start += kThreads * kInFlight) {
    const u32 left = (count - start + kThreads - 1) / kThreads;
    visit.vectors(vectors + start, left < kInFlight ? left : kInFlight);
  }
  const u32 head = u32((span.vectors_begin - span.begin) / unit_bytes);
  const u32 tail = u32((span.end - span.vectors_end) / unit_bytes);
  for (u32 unit = threadIdx.x; unit < head + tail; unit += kThreads) {
    const u64 address =
        unit < head ? span.begin + unit * unit_bytes : span.vectors_end + (unit - head) * unit_bytes;
    visit.unit(reinterpret_cast<T*>(address));
  }
}

}  // namespace amp_plugin
