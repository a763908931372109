// The table of tensors of one launch, and which piece of which tensor a block works on.
//
// Each tensor is cut into chunks of equal size, one block a chunk. Chunks are cut at multiples of
// 16 bytes of the *address*, so that all accesses but those at the two ends of a tensor are aligned
// 16-byte accesses, wherever the tensor begins.
#pragma once

#include "elements.cuh"

namespace amp_plugin {

constexpr u32 kThreads = 256;
constexpr u32 kInFlight = 4;  // 16-byte loads a thread issues before it uses the first
constexpr u32 kFullWarp = 0xffffffffu;

// Laid out as ROW in tensor_table.py.
struct alignas(16) Row {
  u64 address;
  u64 out_address;  // cast only
  u64 numel;
  u32 first_block;  // ascending; an empty tensor shares its successor's
  DType dtype;
  DType out_dtype;  // cast only
  u16 unused;
};

// Find the row of a block: the last one that begins at or before it.
//
// Every warp looks for itself, 32 rows a round: two rounds for 1000 tensors, and no barrier.
__device__ inline u32 row_of_block(const Row* rows, u32 count, u32 block) {
  const u32 lane = threadIdx.x % 32;
  u32 low = 0, size = count;
  while (size > 1) {
    const u32 step = (size + 31) / 32;
    const u32 offset = lane * step;
    const bool at_or_before = offset < size && rows[low + offset].first_block <= block;
    const u32 last = __popc(__ballot_sync(kFullWarp, at_or_before)) - 1;  // lane 0 always votes
    low += last * step;
    size = size - last * step < step ? size - last * step : step;
  }
  return low;
}

// A run of bytes: scalars, then whole vectors, then scalars.
struct Span {
  u64 begin, vectors_begin, vectors_end, end;  // addresses
};

__device__ inline Span span_of_chunk(u64 address, u64 bytes, u64 chunk, u32 chunk_bytes) {
  const u64 chunk_begin = (address & ~u64(15)) + chunk * chunk_bytes;
  const u64 chunk_end = chunk_begin + chunk_bytes;
  Span span;
  span.begin = chunk_begin < address ? address : chunk_begin;
  span.end = chunk_end < address + bytes ? chunk_end : address + bytes;
  span.vectors_begin = (span.begin + 15) & ~u64(15);
  span.vectors_end = span.end & ~u64(15);
  if (span.vectors_begin > span.vectors_end) span.vectors_begin = span.vectors_end = span.end;
  return span;
}

// Call `visit.vectors(address, valid)` for groups of kInFlight vectors, vector k of a thread at
// address[k * kThreads] and present while k < valid, and `visit.unit(address)` for each run of
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
