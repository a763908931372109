// The CUDA kernels there are. A new one is a line here, a line in cuda/catalogue.py and a file
// cuda/<name>.cu.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace amp_plugin::cuda {

// The function `name` in cuda/<name>.cu, compiled with -DNORM=`norm` if that is not empty.
struct Kernel {
  const char* name;
  const char* norm;
  uint32_t threads;  // of a block
};

constexpr uint32_t kThreads = 256;
constexpr uint32_t kBlocksPerMultiprocessor = 4;  // of kernels that take a table; as in tensor_table.cuh

// In the order of kKernels; the first two stand for one kernel for each norm.
enum KernelNumber : size_t {
  kNormCheck = 0,
  kUnscale = 5,
  kMultiply = 10,
  kCast,
  kUpdateScale,
  kClipFactor,
  kAdam,
  kSgd,
  kPackWeights,
  kUnpackWeights,
  kPackMeasurements,
  kUnpackMeasurements,
};

inline constexpr std::array kKernels{
    Kernel{"norm_check", "Squares", kThreads},
    Kernel{"norm_check", "Magnitudes", kThreads},
    Kernel{"norm_check", "Maximum", kThreads},
    Kernel{"norm_check", "Minimum", kThreads},
    Kernel{"norm_check", "Power", kThreads},
    Kernel{"unscale", "Squares", kThreads},
    Kernel{"unscale", "Magnitudes", kThreads},
    Kernel{"unscale", "Maximum", kThreads},
    Kernel{"unscale", "Minimum", kThreads},
    Kernel{"unscale", "Power", kThreads},
    Kernel{"multiply", "", kThreads},
    Kernel{"cast", "", kThreads},
    Kernel{"update_scale", "", 1},
    Kernel{"clip_factor", "", 1},
    Kernel{"adam", "", kThreads},
    Kernel{"sgd", "", kThreads},
    Kernel{"pack_weights", "", kThreads},
    Kernel{"unpack_weights", "", kThreads},
    Kernel{"pack_measurements", "", 1},
    Kernel{"unpack_measurements", "", 1},
};

}  // namespace amp_plugin::cuda
