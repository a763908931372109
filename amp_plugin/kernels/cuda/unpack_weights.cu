// unpack_weights: join bfloat16 halves and int16 halves to float32 tensors.
//
// Rows: master and high half; `table.count` behind it, the low half. Bytes: 4 read, 4 written a weight.
#include "step_rows.cuh"

using namespace amp_plugin;

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor) unpack_weights(Table table) {
  for_each_pair(table, [](u64 master, u64 high, u64 low, u64 at, auto group) {
    constexpr int kCount = decltype(group)::kCount;
    store_lanes<Float32, kCount>(master, at, load_pair<kCount>(high, low, at));
  });
}
