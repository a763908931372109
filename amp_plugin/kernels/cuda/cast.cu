// cast: copy tensors into tensors of other floating dtypes, pair by pair.
//
// The wider side of a pair moves by 16-byte accesses, the narrower by as many elements, so that both
// are coalesced; a pair with an unaligned side moves element by element. fp64 to a 16-bit dtype rounds
// through fp32, as torch does. Bytes: all of src read, all of out written.
#include "tensor_table.cuh"

using namespace amp_plugin;

template <typename From, typename To>
__device__ To convert(From x) {
  return To::narrow(typename To::Wide(From::widen(x)));
}

template <typename From, typename To, int kCount>
__device__ void cast_range(const From* from, To* to, u32 numel) {
  using In = Packet<From, kCount>;
  using Out = Packet<To, kCount>;
  const u32 count = numel / kCount;
  const In* in = reinterpret_cast<const In*>(from);
  Out* out = reinterpret_cast<Out*>(to);
  for (u32 start = threadIdx.x; start < count; start += kThreads * kInFlight) {
    In loaded[kInFlight];
#pragma unroll
    for (u32 k = 0; k < kInFlight; ++k) {
      if (start + k * kThreads < count) loaded[k] = load_packet(in + start + k * kThreads);
    }
#pragma unroll
    for (u32 k = 0; k < kInFlight; ++k) {
      if (start + k * kThreads >= count) continue;
      Out converted;
#pragma unroll
      for (int i = 0; i < kCount; ++i) converted.element[i] = convert<From, To>(loaded[k].element[i]);
      store_packet(out + start + k * kThreads, converted);
    }
  }
  for (u32 i = count * kCount + threadIdx.x; i < numel; i += kThreads) to[i] = convert<From, To>(from[i]);
}

template <typename From, typename To>
__device__ void cast_chunk(const Row& row, u64 chunk, u32 chunk_elements) {
  constexpr int kCount = 16 / int(sizeof(From) > sizeof(To) ? sizeof(From) : sizeof(To));
  const u64 begin = chunk * chunk_elements;
  const u64 left = row.numel - begin;
  const u32 numel = left < chunk_elements ? u32(left) : chunk_elements;
  const From* from = reinterpret_cast<const From*>(row.address) + begin;
  To* to = reinterpret_cast<To*>(row.out_address) + begin;
  const bool aligned = u64(from) % (kCount * sizeof(From)) == 0 && u64(to) % (kCount * sizeof(To)) == 0;
  if (aligned) {
    cast_range<From, To, kCount>(from, to, numel);
  } else {
    cast_range<From, To, 1>(from, to, numel);
  }
}

template <typename From>
__device__ void cast_chunk_from(const Row& row, u64 chunk, u32 chunk_elements) {
  switch (row.out_dtype) {
    case kFloat16: return cast_chunk<From, Float16>(row, chunk, chunk_elements);
    case kBFloat16: return cast_chunk<From, BFloat16>(row, chunk, chunk_elements);
    case kFloat32: return cast_chunk<From, Float32>(row, chunk, chunk_elements);
    default: return cast_chunk<From, Float64>(row, chunk, chunk_elements);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 4)
    cast(const Row* rows, u32 count, u32 chunk_elements) {
  const Row row = rows[row_of_block(rows, count, blockIdx.x)];
  const u64 chunk = blockIdx.x - row.first_block;
  switch (row.dtype) {
    case kFloat16: return cast_chunk_from<Float16>(row, chunk, chunk_elements);
    case kBFloat16: return cast_chunk_from<BFloat16>(row, chunk, chunk_elements);
    case kFloat32: return cast_chunk_from<Float32>(row, chunk, chunk_elements);
    default: return cast_chunk_from<Float64>(row, chunk, chunk_elements);
  }
}
