// pack_measurements_ and unpack_measurements on a GPU: one launch each around a collective.

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>

#include "cuda_device.h"
#include "op_calls.h"
#include "packed_measurements.h"
#include "tensor_memory.h"

namespace amp_plugin::cuda {
namespace {

// Returns null if the measurements do not fit into one launch, or if our kernels do not run on the device.
// Plain torch ops are used then.
Device* device_for(const at::Tensor& packed, size_t most) {
  return most > kMostPacked ? nullptr : Device::find(packed.device().index());
}

void pack_measurements_(
    const at::Tensor& packed, at::TensorList norms, at::TensorList found_infs, at::IntArrayRef slots,
    at::IntArrayRef replicas, double p) {
  Device* device = device_for(packed, std::max({norms.size(), found_infs.size(), replicas.size()}));
  if (device == nullptr) {
    return call_op<pack_measurements_>(
        "amp_plugin::_plain_pack_measurements_", packed, norms, found_infs, slots, replicas, p);
  }
  check_packing(packed, norms, slots, replicas);
  Measurements measured{};
  measured.norm_count = static_cast<uint32_t>(norms.size());
  measured.flag_count = static_cast<uint32_t>(found_infs.size());
  measured.power_count = static_cast<uint32_t>(replicas.size());
  for (size_t i = 0; i < norms.size(); ++i) {
    measured.norms[i] = scalar(norms[i], "a norm", device->device());
    measured.slots[i] = static_cast<uint8_t>(slots[i]);
  }
  for (size_t i = 0; i < found_infs.size(); ++i)
    measured.flags[i] = scalar(found_infs[i], "found_inf", device->device());
  for (size_t i = 0; i < replicas.size(); ++i) measured.replicas[i] = static_cast<double>(replicas[i]);
  device->launch(kPackMeasurements, 1, device->stream(), measured, packed.mutable_data_ptr<double>(), p);
  increment_versions({packed});
}

std::tuple<at::Tensor, at::Tensor> unpack_measurements(at::TensorList packed, double p) {
  check_packed(packed);
  Device* device = device_for(packed[0], packed.size());
  if (device == nullptr) {
    return call_op<unpack_measurements>("amp_plugin::_plain_unpack_measurements", packed, p);
  }
  Packed given{};
  given.count = static_cast<uint32_t>(packed.size());
  for (size_t i = 0; i < packed.size(); ++i) {
    given.values[i] = packed[i].const_data_ptr<double>();
    given.power_counts[i] = static_cast<uint32_t>(packed[i].numel() - 1);
  }
  const at::Tensor norm = at::empty({}, at::device(device->device()).dtype(at::kFloat));
  const at::Tensor found_inf = at::empty({}, at::device(device->device()).dtype(at::kFloat));
  device->launch(
      kUnpackMeasurements, 1, device->stream(), given, p, norm.mutable_data_ptr<float>(),
      found_inf.mutable_data_ptr<float>());
  return {norm, found_inf};
}

}  // namespace

TORCH_LIBRARY_IMPL(amp_plugin, CUDA, m) {
  m.impl("pack_measurements_", pack_measurements_);
  m.impl("unpack_measurements", unpack_measurements);
}

}  // namespace amp_plugin::cuda
