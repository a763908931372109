// unpack_weights: join bfloat16 halves and int16 halves to float32 tensors.
//
// Rows: master and high half; `table.count` behind it, the low half. Bytes: 4 read, 4 written a weight.
#include "step_rows.cuh"

using namespace amp_plugin;

// Not a lambda in the kernel: NVRTC 13.0 takes one for a function of the host.
struct Unpack {
  template <typename Group>
  __device__ void operator()(u64 master, u64 high, u64 low, u64 at, Group) const {
    constexpr int kCount = Group::kCount;
    store_lanes<Float32, kCount>(master, at, load_pair<kCount>(high, low, at));
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor) unpack_weights(Table table) {
  for_each_pair(table, Unpack());
}
