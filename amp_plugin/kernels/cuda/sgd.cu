// sgd: a whole step of SGD over all parameters of a table, torch's operations in their order.
//
// Writes nothing where found_inf is above 0.
// Bytes for B of float32 gradients: 3 B read with momentum, 2 B written; 2 B and B without.
#include "step_rows.cuh"

using namespace amp_plugin;

struct SgdOptions {
  double lr, momentum, dampening, weight_decay;
  u32 nesterov, maximize, first_step, unused;
};

// What one step does to an element; float32 numbers, worked out in float64.
template <bool kHasMomentum>
struct SgdRule {
  float divisor, decay, momentum, damped, step_size;
  bool nesterov, first_step;

  __device__ SgdRule(const SgdOptions& options, double lr, double divided_by)
      : divisor(float(options.maximize ? -divided_by : divided_by)),
        decay(float(options.weight_decay)),
        momentum(float(options.momentum)),
        damped(float(1 - options.dampening)),
        step_size(float(-lr)),
        nesterov(options.nesterov != 0),
        first_step(options.first_step != 0) {}

  __device__ float operator()(float param, float grad, float* states) const {
    grad = grad / divisor;
    if (decay != 0) grad = fmaf(param, decay, grad);
    if constexpr (kHasMomentum) {
      states[0] = first_step ? grad : fmaf(damped, grad, states[0] * momentum);
      grad = nesterov ? fmaf(states[0], momentum, grad) : states[0];
    }
    return fmaf(grad, step_size, param);
  }
};

template <bool kHasMomentum>
__device__ void step_all(const Table& table, const SgdRule<kHasMomentum>& rule) {
  for_each_piece(table, [&](const Row&, u32 tensor, u32 begin, u32 end) {
    step_piece<kHasMomentum ? 1 : 0>(Parameter(table, tensor), begin, end, rule);
  });
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    sgd(Table table, SgdOptions options, DeviceScalar lr_tensor, DeviceScalar grad_scale,
        DeviceScalar found_inf) {
  if (read_or(found_inf, 0) > 0) return;
  const double lr = read_or(lr_tensor, options.lr), divided_by = read_or(grad_scale, 1);
  if (options.momentum != 0) {
    step_all(table, SgdRule<true>(options, lr, divided_by));
  } else {
    step_all(table, SgdRule<false>(options, lr, divided_by));
  }
}
