// unpack_weights: join bfloat16 high halves and int16 low halves to float32 weights.
//
// Two rows per weight, `table.count` apart: the first has the master and the high half, the second the low
// half. Bytes: 4 read and 4 written per weight.
#include "step_rows.cuh"

using namespace amp_plugin::cuda;

// Not a generic lambda (one with `auto` parameters): NVRTC before 13.1 compiles its template as a host
// function.
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
