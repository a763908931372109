// unpack_weights: join bfloat16 halves and int16 halves to float32 tensors.
//
// Rows: master and high half; `table.count` behind it, the low half. Bytes: 4 read, 4 written a weight.
#include "step_rows.cuh"

using namespace amp_plugin::cuda;

// No lambda with auto: NVRTC before 13.1 takes its template for a function of the host.
struct UnpackWeights {
  template <int kCount>
  __device__ void operator()(u64 master, u64 high, u64 low, u64 at, Group<kCount>) const {
    const auto highs = load_raw<kCount>(high, at, false), lows = load_raw<kCount>(low, at, false);
    store_lanes<Float32, kCount>(master, at, join_pair(highs, lows));
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor) unpack_weights(Table table) {
  for_each_pair(table, UnpackWeights{});
}
