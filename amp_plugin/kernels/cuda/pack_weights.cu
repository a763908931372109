// pack_weights: split float32 tensors into bfloat16 halves and the int16 halves that make them float32 again.
//
// Rows: master and high half; `table.count` behind it, the low half. Bytes: 4 read, 4 written a weight.
#include "step_rows.cuh"

using namespace amp_plugin;

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor) pack_weights(Table table) {
  for_each_pair(table, [](u64 master, u64 high, u64 low, u64 at, auto group) {
    constexpr int kCount = decltype(group)::kCount;
    store_pair<kCount>(high, low, at, load_lanes<Float32, kCount>(master, at));
  });
}
