// Checks for the packed measurements that ranks add up. kernels/reference.py describes the layout.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>

namespace amp_plugin {

inline void check_packing(
    const at::Tensor& packed, at::TensorList norms, at::IntArrayRef slots, at::IntArrayRef replicas) {
  const auto count = static_cast<int64_t>(replicas.size());
  const bool in_range =
      std::all_of(slots.begin(), slots.end(), [&](int64_t slot) { return slot >= 0 && slot < count; });
  TORCH_CHECK_VALUE(
      in_range && norms.size() == slots.size() && packed.dim() == 1 && packed.numel() == count + 1,
      "pack_measurements_: got ", norms.size(), " norms, slots ", slots, ", ", count,
      " replicas and packed of shape ", packed.sizes(), "; give one slot below ", count,
      " for each norm, and one element more than there are replicas");
  TORCH_CHECK_VALUE(
      packed.scalar_type() == at::kDouble && packed.is_contiguous(), "pack_measurements_: packed is ",
      packed.scalar_type(), packed.is_contiguous() ? "" : " with gaps", "; give float64 without gaps");
}

inline void check_packed(at::TensorList packed) {
  TORCH_CHECK_VALUE(!packed.empty(), "unpack_measurements: got no packed measurements; give at least one");
  for (const at::Tensor& values : packed) {
    TORCH_CHECK_VALUE(
        values.scalar_type() == at::kDouble && values.dim() == 1 && values.numel() > 0 &&
            values.is_contiguous() && values.device() == packed[0].device(),
        "unpack_measurements: got ", values.scalar_type(), " of shape ", values.sizes(), " on ",
        values.device(), "; give what pack_measurements_ has written, all on ", packed[0].device());
  }
}

}  // namespace amp_plugin
