// The CUDA kernels there are: the function `name` in cuda/<name>.cu.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "cuda_layout.h"

namespace amp_plugin::cuda {

struct Kernel {
  const char* name;  // with its norm, if it is compiled once for each
  uint32_t threads;  // of a block
};

// In the order of kKernels; the first two stand for one kernel for each norm.
enum KernelNumber : size_t {
  kNormCheck = 0,
  kUnscale = 3,
  kMultiply = 6,
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
    Kernel{"norm_check Squares", kThreads},
    Kernel{"norm_check Maximum", kThreads},
    Kernel{"norm_check Power", kThreads},
    Kernel{"unscale Squares", kThreads},
    Kernel{"unscale Maximum", kThreads},
    Kernel{"unscale Power", kThreads},
    Kernel{"multiply", kThreads},
    Kernel{"cast", kThreads},
    Kernel{"update_scale", 1},
    Kernel{"clip_factor", 1},
    Kernel{"adam", kThreads},
    Kernel{"sgd", kThreads},
    Kernel{"pack_weights", kThreads},
    Kernel{"unpack_weights", kThreads},
    Kernel{"pack_measurements", 1},
    Kernel{"unpack_measurements", 1},
};

}  // namespace amp_plugin::cuda
