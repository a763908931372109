#include "cpu_ops.h"

#include "boxed_kernel.h"

using amp_plugin::boxed;

// Those that C++ calls too are registered by their type.
TORCH_LIBRARY_IMPL(amp_plugin, CPU, m) {
  m.impl("norm_check", amp_plugin::norm_check);
  m.impl("unscale_", amp_plugin::unscale_);
  m.impl("multiply_", amp_plugin::multiply_);
  m.impl("cast", amp_plugin::cast);
  m.impl("clip_factor", boxed<amp_plugin::clip_factor>());
  m.impl("update_scale_", boxed<amp_plugin::update_scale_>());
  m.impl("pack_measurements_", boxed<amp_plugin::pack_measurements_>());
  m.impl("unpack_measurements", boxed<amp_plugin::unpack_measurements>());
  m.impl("adam_", amp_plugin::adam_);
  m.impl("sgd_", amp_plugin::sgd_);
  m.impl("pack_weights_", boxed<amp_plugin::pack_weights_>());
  m.impl("unpack_weights_", boxed<amp_plugin::unpack_weights_>());
  m.impl("round_weights_", boxed<amp_plugin::round_weights_>());
}
