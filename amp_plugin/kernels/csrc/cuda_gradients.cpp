#include "cuda_gradients.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include <limits>

namespace amp_plugin::cuda {
namespace {

// The position of a norm among the kernels for the three norms; see KernelNumber.
size_t form_of(double p) {
  if (p == 2.0) return 0;
  return p == std::numeric_limits<double>::infinity() ? 1 : 2;
}

}  // namespace

GradientTable::GradientTable(Device& device, at::TensorList gradients)
    : GradientTable(device, device.stream(), nullptr, gradients.size()) {
  table_ = device.table(gradients, stream_);
}

std::unique_ptr<GradientTable> GradientTable::kept(
    size_t count, const at::Tensor& first, const at::Tensor& scale) {
  if (!scale.is_cuda()) return nullptr;
  Device* device = Device::find(scale.device().index());
  if (device == nullptr) return nullptr;
  const Handle stream = device->stream();
  SharedTable kept = device->kept_table(count, first, stream);
  if (!kept) return nullptr;
  return std::unique_ptr<GradientTable>(new GradientTable(*device, stream, std::move(kept), count));
}

bool GradientTable::are_same(size_t begin, const at::Tensor* const* gradients, size_t count) const {
  return are_of(table_->rows.data() + begin, gradients, count, device_.device());
}

Measured GradientTable::measure(bool writes, const at::Tensor& inv_scale, double p, bool is_scale) const {
  const at::AutoDispatchBelowADInplaceOrView below;
  const c10::Device device = device_.device();
  const DeviceScalar factor = scalar(inv_scale, "inv_scale", device, is_scale);
  const at::Tensor norm = at::empty({}, at::device(device).dtype(at::kFloat));
  const at::Tensor found_inf = at::empty({}, at::device(device).dtype(at::kFloat));
  const at::Tensor flags = at::empty({static_cast<int64_t>(count_)}, at::device(device).dtype(at::kByte));
  const Results results{
      norm.mutable_data_ptr<float>(), found_inf.mutable_data_ptr<float>(), flags.mutable_data_ptr<uint8_t>()};
  const size_t kernel = (writes ? kUnscale : kNormCheck) + form_of(p);
  device_.launch(kernel, device_.blocks(table_->table), stream_, table_->table, p, factor, results);
  return {norm, found_inf, flags};
}

at::Tensor GradientTable::multiply_(
    const at::Tensor& factor, std::optional<double> max_norm, const OptionalTensor& skipped) const {
  const at::AutoDispatchBelowADInplaceOrView below;
  const DeviceScalar value = scalar(factor, "factor", device_.device());
  if (skipped) require_one_element(*skipped, "found_inf", device_.device(), at::kFloat);
  const void* flag = skipped ? skipped->const_data_ptr() : nullptr;
  at::Tensor found_inf = at::empty({}, at::device(device_.device()).dtype(at::kFloat));
  device_.launch(
      kMultiply, device_.blocks(table_->table), stream_, table_->table, value,
      static_cast<float>(max_norm.value_or(-1.0)), flag, found_inf.mutable_data_ptr<float>());
  return found_inf;
}

}  // namespace amp_plugin::cuda
