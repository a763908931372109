// multiply: multiply all tensors by a factor that is on the device. If the factor is 1, nothing is written.
//
// If max_norm is 0 or more, the number given is a norm, and the factor is the one that clips it to max_norm.
// found_inf becomes 1 if a product that was written is not finite, else 0. Bytes: B read, B written (0 if the
// factor is 1).
#include "measure.cuh"

using namespace amp_plugin::cuda;

template <typename T>
struct MultiplyVisit {
  typename T::Wide factor;
  u32 marks;

  template <bool kWhole>
  __device__ void vectors(Vector<T>* address, u32 valid) {
    Vector<T> loaded[kInFlight];
#pragma unroll
    for (u32 k = 0; k < kInFlight; ++k) {
      loaded[k] = kWhole || k < valid ? load_packet(address + k * kThreads) : Vector<T>{};
    }
#pragma unroll
    for (u32 k = 0; k < kInFlight; ++k) {
      if (!kWhole && k >= valid) continue;
      multiply_packet(loaded[k], factor);
      marks |= non_finite_marks(loaded[k]);
      store_packet(address + k * kThreads, loaded[k]);
    }
  }

  __device__ void unit(T* address) {
    Packet<T, 1> one{{*address}};
    multiply_packet(one, factor);
    marks |= non_finite_marks(one);
    *address = one.element[0];
  }
};

template <typename T>
__device__ u32 multiply_piece(const Row& row, u32 per_element, u32 begin, u32 end, double factor) {
  MultiplyVisit<T> visit{typename T::Wide(factor), 0};
  const Span span = span_of_piece(row.address, row.numel * per_element * sizeof(T), begin, end);
  for_each_in_span<T>(span, sizeof(T), visit);
  return visit.marks;
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    multiply(Table table, DeviceScalar number, float max_norm, const float* skipped, float* found_inf) {
  const double given = read(number);
  const double factor = max_norm < 0 ? given : clip_factor_of(float(given), max_norm, skipped);
  if (factor == 1) {
    if (blockIdx.x == 0 && threadIdx.x == 0) *found_inf = 0;
    return;
  }
  Measured mine{0, 0}, all;
  for_each_piece(table, [&](const Row& row, u32, u32 begin, u32 end) {
    switch (row.dtype) {
      case kFloat16: mine.bits |= multiply_piece<Float16>(row, 1, begin, end, factor); break;
      case kBFloat16: mine.bits |= multiply_piece<BFloat16>(row, 1, begin, end, factor); break;
      case kFloat32: mine.bits |= multiply_piece<Float32>(row, 1, begin, end, factor); break;
      case kFloat64: mine.bits |= multiply_piece<Float64>(row, 1, begin, end, factor); break;
      case kComplex64: mine.bits |= multiply_piece<Float32>(row, 2, begin, end, factor); break;
      case kComplex128: mine.bits |= multiply_piece<Float64>(row, 2, begin, end, factor); break;
    }
  });
  if (join_blocks(table, Maximum::of(0), mine, all) && threadIdx.x == 0) *found_inf = all.bits ? 1.0f : 0.0f;
}
