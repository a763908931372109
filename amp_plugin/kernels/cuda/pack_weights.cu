// pack_weights: split float32 weights into a bfloat16 high half and an int16 low half each, which together
// restore the float32.
//
// Two rows per weight, `table.count` apart: the first has the master and the high half, the second the low
// half. Bytes: 4 read and 4 written per weight.
#include "step_rows.cuh"

using namespace amp_plugin::cuda;

// Not a generic lambda (one with `auto` parameters): NVRTC before 13.1 compiles its template as a host
// function.
struct PackWeights {
  template <int kCount>
  __device__ void operator()(u64 master, u64 high, u64 low, u64 at, Group<kCount>) const {
    store_pair<kCount>(high, low, at, widen_float32(load_raw<kCount>(master, at, true)));
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor) pack_weights(Table table) {
  for_each_pair(table, PackWeights{});
}
