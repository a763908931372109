#include "cpu_ops.h"

#include <torch/library.h>

TORCH_LIBRARY_IMPL(amp_plugin, CPU, m) {
  m.impl("norm_check", amp_plugin::norm_check);
  m.impl("unscale_", amp_plugin::unscale_);
  m.impl("multiply_", amp_plugin::multiply_);
  m.impl("cast", amp_plugin::cast);
  m.impl("clip_factor", amp_plugin::clip_factor);
  m.impl("update_scale_", amp_plugin::update_scale_);
  m.impl("pack_measurements_", amp_plugin::pack_measurements_);
  m.impl("unpack_measurements", amp_plugin::unpack_measurements);
  m.impl("adam_", amp_plugin::adam_);
  m.impl("sgd_", amp_plugin::sgd_);
  m.impl("pack_weights_", amp_plugin::pack_weights_);
  m.impl("unpack_weights_", amp_plugin::unpack_weights_);
  m.impl("round_weights_", amp_plugin::round_weights_);
}
