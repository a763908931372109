// The ops on a few numbers: update_scale_, clip_factor, judge_step_, pack_measurements_ and
// unpack_measurements. The CPU calls a function of cuda_layout.h. A GPU launches the kernel that consists of
// that function, with the same arguments.

#include <algorithm>
#include <limits>
#include <tuple>
#include <type_traits>

#include "one_value.h"
#include "served_ops.h"
#include "tensor_memory.h"

namespace amp_plugin {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

template <typename... Parameters>
void run(
    c10::Device on, const char* kernel, void (*function)(Parameters...),
    const std::type_identity_t<std::decay_t<Parameters>>&... arguments) {
  if (on.is_cpu()) return function(arguments...);
  cuda::Device::find(on.index())->launch(kernel, arguments...);
}

// The address of a tensor's only element. `Number` is const if the element is only read.
template <typename Number>
Number* address_in(const at::Tensor& tensor, const char* name, c10::Device device) {
  require_one_element(tensor, name, device, c10::CppTypeToScalarType<std::remove_const_t<Number>>::value);
  if constexpr (std::is_const_v<Number>) {
    return tensor.const_data_ptr<std::remove_const_t<Number>>();
  } else {
    return tensor.mutable_data_ptr<Number>();
  }
}

const float* address_in(const OptionalTensor& tensor, const char* name, c10::Device device) {
  return tensor ? address_in<const float>(*tensor, name, device) : nullptr;
}

void update_scale_(
    c10::Device device, const at::Tensor& scale, const at::Tensor& growth_tracker,
    const at::Tensor& hysteresis_tracker, const at::Tensor& found_inf, double growth_factor,
    double backoff_factor, int64_t growth_interval, double min_scale, double max_scale, int64_t hysteresis,
    int64_t mode) {
  constexpr int64_t kLongest = std::numeric_limits<int>::max();
  constexpr double kLargest = std::numeric_limits<float>::max();
  const cuda::ScaleRule rule{
      growth_factor,
      backoff_factor,
      static_cast<int>(std::min(growth_interval, kLongest)),
      static_cast<float>(min_scale),
      static_cast<float>(std::min(max_scale, kLargest)),
      static_cast<int>(hysteresis),
      static_cast<int>(mode)};
  const char* name = "update_scale_";
  run(device, "update_scale", cuda::adjust_scale, address_in<float>(scale, name, device),
      address_in<int>(growth_tracker, name, device), address_in<int>(hysteresis_tracker, name, device),
      address_in<const float>(found_inf, name, device), rule);
  increment_versions({scale, growth_tracker, hysteresis_tracker});
}

at::Tensor clip_factor(
    c10::Device device, const at::Tensor& norm, double max_norm, const OptionalTensor& scale,
    const OptionalTensor& found_inf) {
  const at::Tensor factor = new_number(device);
  run(device, "clip_factor", cuda::write_clip_factor, address_in<const float>(norm, "norm", device),
      static_cast<float>(max_norm), address_in(scale, "scale", device),
      address_in(found_inf, "found_inf", device), factor.mutable_data_ptr<float>());
  return factor;
}

at::Tensor judge_step_(
    c10::Device device, at::TensorList values, const at::Tensor& norm, const at::Tensor& found_inf,
    const at::Tensor& statistics, at::TensorList growth_trackers, double sigma, int64_t window,
    int64_t warmup, double least_deviation, int64_t action) {
  TORCH_CHECK_VALUE(
      statistics.scalar_type() == at::kFloat && statistics.numel() == 4 && statistics.is_contiguous() &&
          statistics.device() == device,
      "judge_step_: statistics are ", statistics.scalar_type(), " of shape ", statistics.sizes(), " on ",
      statistics.device(), "; give mean, variance, steps and held as float32 [4] on ", device);
  cuda::StepValues given{};
  for (const at::Tensor& value : values) given.values[given.count++] = scalar(value, "a value", device);
  for (const at::Tensor& tracker : growth_trackers)
    given.trackers[given.tracker_count++] = address_in<int>(tracker, "a growth tracker", device);
  const at::Tensor judged = at::empty({cuda::kJudgedNumbers}, at::device(device).dtype(at::kFloat));
  const cuda::SpikeRule rule{
      static_cast<float>(sigma), static_cast<float>(window), static_cast<float>(warmup),
      static_cast<float>(least_deviation), static_cast<int>(action)};
  run(device, "judge_step", cuda::judge_values, given, address_in<const float>(norm, "norm", device),
      address_in<const float>(found_inf, "found_inf", device),
      reinterpret_cast<cuda::StepStatistics*>(statistics.mutable_data_ptr<float>()), rule,
      judged.mutable_data_ptr<float>());
  increment_versions({statistics});
  increment_versions(growth_trackers);
  return judged;
}

void pack_measurements_(
    c10::Device device, const at::Tensor& packed, at::TensorList norms, at::TensorList found_infs,
    at::IntArrayRef slots, at::IntArrayRef replicas, double p) {
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
  cuda::Measurements given{};
  for (const at::Tensor& norm : norms) given.norms[given.norm_count++] = scalar(norm, "a norm", device);
  for (const at::Tensor& flag : found_infs)
    given.flags[given.flag_count++] = scalar(flag, "found_inf", device);
  for (const int64_t number : replicas) given.replicas[given.power_count++] = static_cast<double>(number);
  std::copy(slots.begin(), slots.end(), given.slots);
  run(device, "pack_measurements", cuda::pack_powers, given, packed.mutable_data_ptr<double>(), p);
  increment_versions({packed});
}

std::tuple<at::Tensor, at::Tensor> unpack_measurements(c10::Device device, at::TensorList packed, double p) {
  TORCH_CHECK_VALUE(!packed.empty(), "unpack_measurements: got no packed measurements; give at least one");
  cuda::Packed given{};
  for (const at::Tensor& values : packed) {
    TORCH_CHECK_VALUE(
        values.scalar_type() == at::kDouble && values.dim() == 1 && values.numel() > 0 &&
            values.is_contiguous() && values.device() == device,
        "unpack_measurements: got ", values.scalar_type(), " of shape ", values.sizes(), " on ",
        values.device(), "; give what pack_measurements_ has written, all on ", device);
    given.power_counts[given.count] = static_cast<uint32_t>(values.numel() - 1);
    given.values[given.count++] = values.const_data_ptr<double>();
  }
  const at::Tensor norm = new_number(device), found_inf = new_number(device);
  run(device, "unpack_measurements", cuda::unpack_powers, given, p, norm.mutable_data_ptr<float>(),
      found_inf.mutable_data_ptr<float>());
  return {norm, found_inf};
}

void add_ops(torch::Library& library) {
  add_op(library, "update_scale_", update_scale_);
  add_op(library, "clip_factor", clip_factor);
  add_op(library, "judge_step_", judge_step_, cuda::kMostPacked);
  add_op(library, "pack_measurements_", pack_measurements_, cuda::kMostPacked);
  add_op(library, "unpack_measurements", unpack_measurements, cuda::kMostPacked);
}

}  // namespace

TORCH_LIBRARY_IMPL(amp_plugin, CPU, library) { add_ops(library); }
TORCH_LIBRARY_IMPL(amp_plugin, CUDA, library) { add_ops(library); }

}  // namespace amp_plugin
