// adam: a whole step of Adam or AdamW over all parameters of a table, the operations of torch's fused kernel
// on the CPU in their order. Torch's on CUDA differ in the last bits; see docs/numerics.md.
//
// Where found_inf is above 0 it only divides gradients by grad_scale. The last block counts the steps, when
// all have read them. Bytes for B of float32 gradients: 4 B read (gradient, parameter, two moments), 4 B
// written, 3 B if grad_scale is 1.
#include "step_rows.cuh"

using namespace amp_plugin::cuda;

// What one step of a parameter does to an element; float32 numbers, worked out in float64.
struct AdamRule {
  float decay, kept, lerp, beta2, square, eps, step_size;
  Divisor correction;
  bool negates, decays, shrinks;
  u32 seed;

  AdamRule() = default;  // of shared memory, which nobody initializes
  __device__ AdamRule(const AdamOptions& options, double lr, double step)
      : decay(float(options.weight_decay)),
        kept(float(1 - lr * options.weight_decay)),
        lerp(float(1 - options.beta1)),
        beta2(float(options.beta2)),
        square(float(1 - options.beta2)),
        eps(float(options.eps)),
        step_size(float(-lr / (1 - pow(options.beta1, step)))),
        correction(float(sqrt(1 - pow(options.beta2, step)))),
        negates(options.maximize),
        decays(options.weight_decay != 0 && !options.decoupled),
        shrinks(options.weight_decay != 0 && options.decoupled),
        seed(seed_of(step)) {}

  template <bool kAmsgrad>
  struct Of {
    const AdamRule& rule;

    __device__ float operator()(float param, float grad, float* states) const {
      if (rule.negates) grad = -grad;
      if (rule.decays) grad = fmaf(param, rule.decay, grad);
      if (rule.shrinks) param = param * rule.kept;
      const float difference = grad - states[0];
      states[0] =
          rule.lerp < 0.5f ? fmaf(rule.lerp, difference, states[0]) : fmaf(rule.lerp - 1, difference, grad);
      states[1] = fmaf(rule.square * grad, grad, states[1] * rule.beta2);
      float largest = states[1];
      if constexpr (kAmsgrad) largest = states[2] = join_max(states[2], largest);
      const float denominator = rule.correction.divide(sqrtf(largest)) + rule.eps;
      return param + rule.step_size * states[0] / denominator;
    }
  };
};

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor) adam(
    Table table, AdamOptions options, DeviceScalar lr_tensor, DeviceScalar grad_scale,
    DeviceScalar found_inf) {
  const Divisor divisor(float(read_or(grad_scale, 1)));
  if (read_or(found_inf, 0) > 0) return divide_all(table, divisor);
  __shared__ AdamRule rule;
  double known = -1;  // parameters mostly have taken as many steps
  for_each_piece(table, [&](const Row&, u32 tensor, u32 begin, u32 end) {
    const Parameter parameter(table, tensor);
    const double step = parameter.steps() + 1;
    if (step != known) {  // one thread works it out: two powers in float64, which few units compute
      __syncthreads();  // all are done with the one before
      if (threadIdx.x == 0) rule = AdamRule(options, read_or(lr_tensor, options.lr), step);
      __syncthreads();
      known = step;
    }
    if (options.amsgrad) {
      step_piece<3>(parameter, begin, end, divisor, AdamRule::Of<true>{rule}, rule.seed);
    } else {
      step_piece<2>(parameter, begin, end, divisor, AdamRule::Of<false>{rule}, rule.seed);
    }
  });
  if (!comes_last(table.ticket)) return;
  for (u32 tensor = threadIdx.x; tensor < table.count; tensor += kThreads)
    Parameter(table, tensor).count_step();
}
