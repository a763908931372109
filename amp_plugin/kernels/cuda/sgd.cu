// sgd: a whole step of SGD over all parameters of a table, the operations of torch's fused
// kernel on the CPU in their order.
//
// Where found_inf is above 0 it only divides gradients by grad_scale.
// Bytes for B of float32 gradients: 3 B read and written with momentum, 2 B without; B less written if
// grad_scale is 1.
#include "step_rows.cuh"

using namespace amp_plugin::cuda;

// What one step does to an element; float32 numbers, worked out in float64.
template <bool kHasMomentum>
struct SgdRule {
  float decay, momentum, damped, step_size;
  bool negates, nesterov, first_step;

  __device__ SgdRule(const SgdOptions& options, double lr)
      : decay(float(options.weight_decay)),
        momentum(float(options.momentum)),
        damped(float(1 - options.dampening)),
        step_size(float(-lr)),
        negates(options.maximize != 0),
        nesterov(options.nesterov != 0),
        first_step(options.first_step != 0) {}

  __device__ float operator()(float param, float grad, float* states) const {
    if (negates) grad = -grad;
    if (decay != 0) grad = fmaf(param, decay, grad);
    if constexpr (kHasMomentum) {
      states[0] = first_step ? grad : fmaf(damped, grad, states[0] * momentum);
      grad = nesterov ? fmaf(states[0], momentum, grad) : states[0];
    }
    return fmaf(grad, step_size, param);
  }
};

template <bool kHasMomentum>
__device__ void step_all(const Table& table, const Divisor& divisor, const SgdRule<kHasMomentum>& rule) {
  for_each_piece(table, [&](const Row&, u32 tensor, u32 begin, u32 end) {
    step_piece<kHasMomentum ? 1 : 0>(Parameter(table, tensor), begin, end, divisor, rule, 0);
  });
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    sgd(Table table, SgdOptions options, DeviceScalar lr_tensor, DeviceScalar grad_scale,
        DeviceScalar found_inf) {
  const Divisor divisor(float(read_or(grad_scale, 1)));
  if (read_or(found_inf, 0) > 0) return divide_all(table, divisor);
  const double lr = read_or(lr_tensor, options.lr);
  if (options.momentum != 0) {
    step_all(table, divisor, SgdRule<true>(options, lr));
  } else {
    step_all(table, divisor, SgdRule<false>(options, lr));
  }
}
