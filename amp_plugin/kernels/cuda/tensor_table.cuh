// The table of tensors of one launch, and which pieces of which tensors a block works on.
//
// Each tensor is cut into granules of equal size. Where it is measured or multiplied, kGranulesOfTensor more
// stand for the trips to memory that its beginning costs, so that a block with many small tensors has fewer
// bytes to move. As many blocks as the device runs at once share all granules evenly: a block takes one run
// of them, which may begin within one tensor and end within another. Granules begin at multiples of 16 bytes
// of the *address*, so that all accesses but those at the two ends of a tensor are aligned 16-byte accesses,
// wherever the tensor begins.
#pragma once

#include "elements.cuh"

namespace amp_plugin::cuda {

// What is to be swept on a device; __init__.py says how much of each.
constexpr u32 kBlocksPerMultiprocessor = BLOCKS_PER_MULTIPROCESSOR;
constexpr u32 kInFlight = IN_FLIGHT;  // 16-byte loads a thread issues before it uses the first
constexpr u32 kFullWarp = 0xffffffffu;

// Find the row of a granule: the last one that begins at or before it.
//
// The block looks together, kThreads rows a round: each round is a trip to memory, and 256 tensors take one.
__device__ inline u32 row_of_granule(const Row* rows, u32 count, u32 granule) {
  u32 low = 0, size = count;
  while (size > 1) {
    const u32 step = (size + kThreads - 1) / kThreads;
    const u32 offset = threadIdx.x * step;
    const bool at_or_before = offset < size && rows[low + offset].first_granule <= granule;
    const u32 last = u32(__syncthreads_count(at_or_before)) - 1;  // thread 0 always votes
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
// What any thread of another block wrote before is seen after it. One thread's count serves its block: the
// barrier before makes what the others wrote a part of what it releases, the one behind makes what it
// acquires theirs.
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

// A run of bytes: scalars, then whole vectors, then scalars.
struct Span {
  u64 begin, vectors_begin, vectors_end, end;  // addresses
};

__device__ inline Span span_of_piece(u64 address, u64 bytes, u32 begin_granule, u32 end_granule) {
  const u64 first = address & ~u64(15);
  const u64 piece_begin = first + u64(begin_granule) * kGranuleBytes;
  const u64 piece_end = first + u64(end_granule) * kGranuleBytes;
  const u64 end = address + bytes;  // a tensor's last granules may lie behind it
  Span span;
  span.begin = piece_begin < address ? address : piece_begin < end ? piece_begin : end;
  span.end = piece_end < end ? piece_end : end;
  span.vectors_begin = (span.begin + 15) & ~u64(15);
  span.vectors_end = span.end & ~u64(15);
  if (span.vectors_begin > span.vectors_end) span.vectors_begin = span.vectors_end = span.end;
  return span;
}

// Call `visit.vectors<kWhole>(address, valid)` for groups of kInFlight vectors, vector k of a thread at
// address[k * kThreads] and present while k < valid, and `visit.unit(address)` for each run of `unit_bytes`
// (an element, or a complex pair) outside the vectors. All are present in a whole group, which tests none; of
// another a visit sets those that are not to 0: left as they are they would be carried along in registers.
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
