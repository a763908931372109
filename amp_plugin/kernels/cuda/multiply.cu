// multiply: multiply all tensors by a factor that lives on the device; return at once if it is 1.
//
// found_inf must be 0 before; any block that wrote a number that is not finite sets it to 1.
// Bytes: B read, B written (0 if the factor is 1).
#include "measure.cuh"

using namespace amp_plugin;

template <typename T>
struct MultiplyVisit {
  double factor;
  u32 bits;

  __device__ void vectors(Vector<T>* address, u32 valid) {
    Vector<T> loaded[kInFlight];
#pragma unroll
    for (u32 k = 0; k < kInFlight; ++k) {
      if (k < valid) loaded[k] = load_packet(address + k * kThreads);
    }
#pragma unroll
    for (u32 k = 0; k < kInFlight; ++k) {
      if (k >= valid) continue;
      bits |= multiply_packet(loaded[k], factor, false);
      store_packet(address + k * kThreads, loaded[k]);
    }
  }

  __device__ void unit(T* address) {
    Packet<T, 1> one{{*address}};
    bits |= multiply_packet(one, factor, false);
    *address = one.element[0];
  }
};

template <typename T>
__device__ bool multiply_chunk(const Row& row, u32 per_element, u64 chunk, u32 chunk_bytes, double factor) {
  MultiplyVisit<T> visit{factor, 0};
  const Span span = span_of_chunk(row.address, row.numel * per_element * sizeof(T), chunk, chunk_bytes);
  for_each_in_span<T>(span, sizeof(T), visit);
  return visit.bits != 0;
}

extern "C" __global__ void __launch_bounds__(kThreads, 4)
    multiply(const Row* rows, u32 count, u32 chunk_bytes, DeviceScalar factor_scalar, float* found_inf) {
  const double factor = factor_scalar.read();
  if (factor == 1) return;
  const Row row = rows[row_of_block(rows, count, blockIdx.x)];
  const u64 chunk = blockIdx.x - row.first_block;
  bool found = false;
  switch (row.dtype) {
    case kFloat16: found = multiply_chunk<Float16>(row, 1, chunk, chunk_bytes, factor); break;
    case kBFloat16: found = multiply_chunk<BFloat16>(row, 1, chunk, chunk_bytes, factor); break;
    case kFloat32: found = multiply_chunk<Float32>(row, 1, chunk, chunk_bytes, factor); break;
    case kFloat64: found = multiply_chunk<Float64>(row, 1, chunk, chunk_bytes, factor); break;
    case kComplex64: found = multiply_chunk<Float32>(row, 2, chunk, chunk_bytes, factor); break;
    case kComplex128: found = multiply_chunk<Float64>(row, 2, chunk, chunk_bytes, factor); break;
  }
  if (found) *found_inf = 1.0f;  // whoever writes, writes the same
}
