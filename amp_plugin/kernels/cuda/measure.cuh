// Measures tensors in one pass: their norm, and which are not finite. The same pass can also multiply them.
#pragma once

#include "norms.cuh"
#include "tensor_table.cuh"

namespace amp_plugin::cuda {

// Adds the magnitudes of a packet to the total of the norm. kComponents is 1 for real elements, 2 for complex
// pairs.
template <int kComponents, typename T, typename Wide, int kCount, typename Norm>
__device__ Wide add_packet(const Norm& norm, Wide total, const Packet<T, kCount>& packet) {
  Wide magnitudes[kCount / kComponents];
#pragma unroll
  for (int i = 0; i < kCount / kComponents; ++i) {
    magnitudes[i] = fabs(Wide(widened(packet, i * kComponents)));
    if constexpr (kComponents == 2) magnitudes[i] = hypot(magnitudes[i], Wide(widened(packet, 2 * i + 1)));
  }
  return norm.add(total, magnitudes);
}

template <typename T, int kCount>
__device__ u32 bits_of_packet(const Packet<T, kCount>& packet) {
  u32 bits = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) bits |= non_finite_bits(T::widen(packet.element[i]));
  return bits;
}

template <typename T, int kCount>
__device__ bool all_zero(const Packet<T, kCount>& packet) {
  bool zero = true;
#pragma unroll
  for (int i = 0; i < kCount; ++i) zero = zero && T::widen(packet.element[i]) == 0;
  return zero;
}

// Multiplies in the wide type and rounds once.
template <typename T, int kCount>
__device__ void multiply_packet(Packet<T, kCount>& packet, typename T::Wide factor) {
  typename T::Wide products[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) products[i] = widened(packet, i) * factor;
  packet = narrowed<T, kCount>(products);
}

// kComponents is 2 if the norm needs |z| of complex pairs, else 1.
template <typename T, int kComponents, typename Norm, bool kWrites>
struct MeasureVisit {
  using Wide = typename T::Wide;
  const Norm& norm;
  Wide factor;
  bool writes, shrinks;
  Measured measured;

  template <bool kWhole, int kPackets, int kCount>
  __device__ void group(Packet<T, kCount> (&packets)[kPackets], u32 valid) {
    Wide total = Wide(norm.identity());
#pragma unroll
    for (u32 k = 0; k < kPackets; ++k) {
      if (kWhole || k < valid) total = add_packet<kComponents>(norm, total, packets[k]);
    }
    bool finite = true;
    if constexpr (Norm::kHidesNonFinite) finite = all_finite(packets);
    if (finite && norm.trusted(total)) {
      measured.total = norm.join(measured.total, double(total));
    } else {
      again_with_care(packets, valid, total);
    }
  }

  template <int kPackets, int kCount>
  __device__ static bool all_finite(const Packet<T, kCount> (&packets)[kPackets]) {
    u32 marks = 0;
#pragma unroll
    for (int k = 0; k < kPackets; ++k) marks |= non_finite_marks(packets[k]);
    return marks == 0;
  }

  // Multiplies the packets in place, and notes products that are not finite. If the factor shrinks, a product
  // is finite exactly if its element was, so it is not checked.
  template <bool kWhole, int kPackets, int kCount>
  __device__ void multiply(Packet<T, kCount> (&packets)[kPackets], u32 valid) {
#pragma unroll
    for (int k = 0; k < kPackets; ++k) multiply_packet(packets[k], factor);
    if (shrinks || all_finite(packets)) return;
    for (u32 k = 0; k < kPackets; ++k) {
      if (kWhole || k < valid) measured.bits |= bits_of_packet(packets[k]) << kWritten;
    }
  }

  template <int kPackets, int kCount>
  __device__ void again_with_care(const Packet<T, kCount> (&packets)[kPackets], u32 valid, Wide total) {
    double exact = norm.identity();
    bool zero = norm.ignores_zeros() && total == 0;
    for (u32 k = 0; k < kPackets; ++k) {
      if (k < valid) zero = zero && all_zero(packets[k]);
    }
    if (zero) return;
    for (u32 k = 0; k < kPackets; ++k) {
      if (k >= valid) continue;
      exact = add_packet<kComponents>(norm, exact, packets[k]);
      measured.bits |= bits_of_packet(packets[k]);
    }
    measured.total = norm.join(measured.total, exact);
  }

  template <bool kWhole>
  __device__ void vectors(Vector<T>* address, u32 valid) {
    Vector<T> loaded[kInFlight];
#pragma unroll
    for (u32 k = 0; k < kInFlight; ++k) {
      loaded[k] = kWhole || k < valid ? load_packet(address + k * kThreads) : Vector<T>{};
    }
    group<kWhole>(loaded, valid);
    if constexpr (kWrites) {
      if (!writes) return;
      multiply<kWhole>(loaded, valid);
#pragma unroll
      for (u32 k = 0; k < kInFlight; ++k) {
        if (kWhole || k < valid) store_packet(address + k * kThreads, loaded[k]);
      }
    }
  }

  __device__ void unit(T* address) {
    Packet<T, kComponents> one[1];
    for (int i = 0; i < kComponents; ++i) one[0].element[i] = address[i];
    group<true>(one, 1);
    if constexpr (kWrites) {
      if (!writes) return;
      multiply<true>(one, 1);
      for (int i = 0; i < kComponents; ++i) address[i] = one[0].element[i];
    }
  }
};

template <typename T, int kComponents, typename Norm, bool kWrites>
__device__ Measured
measure_components(const Row& row, u32 per_element, u32 begin, u32 end, const Norm& norm, double factor) {
  const bool shrinks = fabs(factor) <= 1 && factor != 0;
  MeasureVisit<T, kComponents, Norm, kWrites> visit{
      norm, typename T::Wide(factor), factor != 1, shrinks, {norm.identity(), 0}};
  const Span span = span_of_piece(row.address, row.numel * per_element * sizeof(T), begin, end);
  for_each_in_span<T>(span, kComponents * sizeof(T), visit);
  return visit.measured;
}

template <typename Norm, bool kWrites>
__device__ Measured measure_piece(const Row& row, u32 begin, u32 end, const Norm& norm, double factor) {
  constexpr int kPair = Norm::kOfComponents ? 1 : 2;
  switch (row.dtype) {
    case kFloat16: return measure_components<Float16, 1, Norm, kWrites>(row, 1, begin, end, norm, factor);
    case kBFloat16: return measure_components<BFloat16, 1, Norm, kWrites>(row, 1, begin, end, norm, factor);
    case kFloat32: return measure_components<Float32, 1, Norm, kWrites>(row, 1, begin, end, norm, factor);
    case kFloat64: return measure_components<Float64, 1, Norm, kWrites>(row, 1, begin, end, norm, factor);
    case kComplex64:
      return measure_components<Float32, kPair, Norm, kWrites>(row, 2, begin, end, norm, factor);
    default: return measure_components<Float64, kPair, Norm, kWrites>(row, 2, begin, end, norm, factor);
  }
}

// Joins the results of the threads of a block, always in the same order. Thread 0 gets the result.
template <typename Norm>
__device__ Measured reduce_block(const Norm& norm, Measured mine) {
  __shared__ Measured of_warp[kThreads / 32];
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto reduce_warp = [&] {
    for (u32 distance = 16; distance > 0; distance /= 2) {
      mine.total = norm.join(mine.total, __shfl_down_sync(kFullWarp, mine.total, distance));
      mine.bits |= __shfl_down_sync(kFullWarp, mine.bits, distance);
    }
  };
  reduce_warp();
  __syncthreads();  // wait until the results of an earlier call have been read
  if (lane == 0) of_warp[warp] = mine;
  __syncthreads();
  if (warp > 0) return mine;
  mine = lane < kThreads / 32 ? of_warp[lane] : Measured{norm.identity(), 0};
  reduce_warp();
  return mine;
}

// Stores the result of this block. The last block then joins the results of all blocks; it returns true, and
// its thread 0 has the total.
template <typename Norm>
__device__ bool join_blocks(const Table& table, const Norm& norm, Measured mine, Measured& all) {
  mine = reduce_block(norm, mine);
  if (threadIdx.x == 0) table.partials[blockIdx.x] = {mine.total, mine.bits, 0};
  if (!comes_last(table.ticket)) return false;
  all = {norm.identity(), 0};
  for (u32 start = threadIdx.x; start < gridDim.x; start += kThreads * kInFlight) {
    // The other blocks have ended and only this one waits, so issue all loads at once.
    Partial loaded[kInFlight];
#pragma unroll
    for (u32 k = 0; k < kInFlight; ++k) {
      loaded[k] = {norm.identity(), 0, 0};
      if (start + k * kThreads < gridDim.x) loaded[k] = table.partials[start + k * kThreads];
    }
#pragma unroll
    for (u32 k = 0; k < kInFlight; ++k) {
      all.total = norm.join(all.total, loaded[k].total);
      all.bits |= loaded[k].bits;
    }
  }
  all = reduce_block(norm, all);
  return true;
}

// The body of norm_check and unscale. The norm is inv_scale * root(total), computed in float64 and rounded
// once. The order is fixed, so every run gives the same result.
template <typename Norm, bool kWrites>
__device__ void measure_all(const Table& table, const Norm& norm, DeviceScalar inv_scale, Results results) {
  const double factor = kWrites ? read(inv_scale) : 1;
  Measured mine{norm.identity(), 0}, all;
  for_each_piece(table, [&](const Row& row, u32 tensor, u32 begin, u32 end) {
    const Measured found = measure_piece<Norm, kWrites>(row, begin, end, norm, factor);
    mine.total = norm.join(mine.total, found.total);
    mine.bits |= found.bits;
    if (found.bits != 0) atomicOr(&table.marks[tensor], found.bits);
  });
  if (!join_blocks(table, norm, mine, all)) return;
  __shared__ u32 seen;
  if (threadIdx.x == 0) seen = all.bits;
  __syncthreads();
  for (u32 i = threadIdx.x; i < table.count; i += kThreads) {
    const u32 marks = seen == 0 ? 0 : atomicExch(&table.marks[i], 0u);
    results.flags[i] = u8((marks | marks >> kWritten) & (kHasInf | kHasNan));
  }
  if (threadIdx.x > 0) return;
  double value = table.granules > 0 ? norm.root(all.total) : 0;
  if (!norm.counts()) {
    value *= fabs(read(inv_scale));
    if (all.bits & kHasNan) value = __longlong_as_double(0x7ff8000000000000ll);
  }
  *results.norm = float(value);
  *results.found_inf = all.bits ? 1.0f : 0.0f;
}

}  // namespace amp_plugin::cuda
