// write_table: bring rows to the device inside the launch itself, as kernel arguments.
//
// A captured launch replays with the arguments it was captured with. A copy from host memory would
// read that memory again at each replay, long after its owner may have gone. At most 4 KB a launch.
#include "tensor_table.cuh"

using namespace amp_plugin;

constexpr u32 kRowsByValue = 120;  // ROWS_BY_VALUE in tensor_table.py

struct RowsByValue {
  Row row[kRowsByValue];
};

extern "C" __global__ void __launch_bounds__(128)
    write_table(const __grid_constant__ RowsByValue rows, u32 count, Row* table) {
  for (u32 i = threadIdx.x; i < count; i += blockDim.x) table[i] = rows.row[i];
}
