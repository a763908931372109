// Kernels of ops on tensor lists: boxing a list copies it, which cat and stack are too quick for.
#pragma once

#include "autocast_kernel.h"

namespace amp_plugin {

// The dispatcher's form of a kernel: unboxed for the ops above, boxed for all others.
c10::KernelFunction kernel_for(AutocastKernel kernel);

}  // namespace amp_plugin
