// Builds one kernel as a shared object: -DKERNEL=norm_check -DKERNEL_FILE='"norm_check.cu"' [-DNORM=Squares].
#include "emulation.h"

#include KERNEL_FILE

extern "C" const char* emulate(unsigned blocks, unsigned threads, void** arguments, int descending) {
  return emulation::launch(KERNEL, blocks, threads, arguments, descending != 0);
}

extern "C" uint64_t barriers_met() { return std::exchange(emulation::barriers, 0); }

extern "C" const size_t* parameter_sizes() { return emulation::parameter_sizes(KERNEL); }

// For tests of the conversions that emulation.h supplies.
extern "C" float emulated_half_to_float(unsigned short bits) { return amp_plugin::cuda::half_to_float(bits); }
extern "C" unsigned short emulated_float_to_half(float value) {
  return amp_plugin::cuda::float_to_half(value);
}
