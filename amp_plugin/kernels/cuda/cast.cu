// cast: copy tensors into tensors of other floating dtypes, pair by pair.
//
// The wider side of a pair moves by 16-byte accesses, the narrower by as many elements, so that both
// are coalesced; a pair with an unaligned side moves element by element. fp64 to a 16-bit dtype rounds
// through fp32, as torch does. Bytes: all of src read, all of out written.
#include "tensor_table.cuh"

using namespace amp_plugin::cuda;

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
      loaded[k] = start + k * kThreads < count ? load_packet(in + start + k * kThreads) : In{};
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
__device__ void cast_piece(const Row& row, u32 begin_granule, u32 end_granule) {
  constexpr int kCount = 16 / int(sizeof(From) > sizeof(To) ? sizeof(From) : sizeof(To));
  const u64 begin = u64(begin_granule) * kGranuleElements;
  const u64 end = u64(end_granule) * kGranuleElements;
  const u32 numel = u32((end < row.numel ? end : row.numel) - begin);
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
__device__ void cast_piece_from(const Row& row, u32 begin, u32 end) {
  switch (row.out_dtype) {
    case kFloat16: return cast_piece<From, Float16>(row, begin, end);
    case kBFloat16: return cast_piece<From, BFloat16>(row, begin, end);
    case kFloat32: return cast_piece<From, Float32>(row, begin, end);
    default: return cast_piece<From, Float64>(row, begin, end);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor) cast(Table table) {
  for_each_piece(table, [&](const Row& row, u32, u32 begin, u32 end) {
    switch (row.dtype) {
      case kFloat16: return cast_piece_from<Float16>(row, begin, end);
      case kBFloat16: return cast_piece_from<BFloat16>(row, begin, end);
      case kFloat32: return cast_piece_from<Float32>(row, begin, end);
      default: return cast_piece_from<Float64>(row, begin, end);
    }
  });
}
