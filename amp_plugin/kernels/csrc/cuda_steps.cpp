// Optimizer steps and stored weights on CUDA tensors. Each op is one launch and never waits for the device.

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>

#include "cuda_device.h"
#include "op_calls.h"
#include "step_rows.h"
#include "tensor_memory.h"

namespace amp_plugin::cuda {
namespace {

using Number = std::optional<at::Tensor>;
using List = at::TensorList;

uint64_t address_of(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

uint32_t add_granules(uint64_t& granules, uint64_t numel) {
  const auto first = static_cast<uint32_t>(granules);
  granules += (numel + kGranuleElements - 1) / kGranuleElements;
  TORCH_CHECK_VALUE(granules < UINT32_MAX, "these tensors are too large for one call; split the list");
  return first;
}

static_assert(
    kStateBFloat16 == static_cast<int>(State::bfloat16) && kStateCodes == static_cast<int>(State::codes));

// The rows of a step, in the layout that cuda/step_rows.cuh describes.
Rows table_rows(const StepRows& parameters, const StepTensors& tensors, const StepRule& rule) {
  const size_t count = parameters.rows().size();
  Rows result;
  result.rows.resize(4 * count);
  result.count = static_cast<uint32_t>(count);
  uint64_t granules = 0;
  for (size_t i = 0; i < count; ++i) {
    const amp_plugin::Row& parameter = parameters.rows()[i];
    Row& first = result.rows[i];
    first.address = address_of(parameter.grad);
    first.out_address = address_of(parameter.param);
    first.numel = static_cast<uint64_t>(parameter.numel);
    first.first_granule = add_granules(granules, first.numel);
    first.dtype = code_of(parameter.grad_type);
    first.out_dtype = parameter.weight == Weight::fp32 ? kFloat32 : kBFloat16;
    Row &second = result.rows[count + i], &third = result.rows[2 * count + i];
    Row& fourth = result.rows[3 * count + i];
    second.address = address_of(parameter.remainder);
    if (rule.counters > 0) {
      second.out_address = address_of(tensors.counter(0, i).mutable_data_ptr());
      second.dtype = code_of(tensors.counter(0, i).scalar_type());
    }
    third.address = address_of(parameter.states[0]);
    third.out_address = address_of(parameter.states[1]);
    fourth.address = address_of(parameter.states[2]);
    if (rule.counters > 1) fourth.out_address = address_of(tensors.counter(1, i).mutable_data_ptr());
    third.dtype = static_cast<uint8_t>(parameter.format);
  }
  result.granules = static_cast<uint32_t>(granules);
  return result;
}

Device* device_of(List params) { return params.empty() ? nullptr : Device::find(params[0].device().index()); }

void step_(
    List params, List grads, List states, List counters, List remainders, c10::string_view name,
    at::ArrayRef<double> numbers, const Number& lr, const Number& grad_scale, const Number& found_inf) {
  Device* device = device_of(params);
  if (device == nullptr) {
    return call_op<step_>(
        "amp_plugin::_plain_step_", params, grads, states, counters, remainders, name, numbers, lr,
        grad_scale, found_inf);
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  const StepRule& rule = step_rule(name, numbers.size());
  const StepTensors tensors{params, grads, states, counters, remainders};
  const StepRows rows(tensors, rule, grad_scale.has_value(), device->device());
  StepNumbers given{};
  std::copy(numbers.begin(), numbers.end(), given.value);
  const Handle stream = device->stream();
  const SharedTable table = device->table(table_rows(rows, tensors, rule), stream);
  device->launch(
      step_kernel(rule), device->blocks(table->table), stream, table->table, given,
      optional_scalar(lr, "lr", device->device()),
      optional_scalar(grad_scale, "grad_scale", device->device()),
      optional_scalar(found_inf, "found_inf", device->device()));
  rows.finish();
}

// Return true if the kernels can work on this stored weight. Any other is processed by torch's ops.
bool is_a_pair(const at::Tensor& master, const at::Tensor& high, const at::Tensor& low, c10::Device device) {
  return master.device() == device && high.device() == device && low.device() == device &&
      master.scalar_type() == at::kFloat && high.scalar_type() == at::kBFloat16 &&
      low.scalar_type() == at::kShort && master.sizes() == high.sizes() && master.sizes() == low.sizes() &&
      master.is_non_overlapping_and_dense() && same_memory_order(master, high) &&
      same_memory_order(master, low);
}

// The rows for for_each_pair() in cuda/step_rows.cuh. Returns nothing if one of the weights is not a pair.
std::optional<Rows> pair_rows(List masters, List high, List low, c10::Device device) {
  const size_t count = masters.size();
  if (high.size() != count || low.size() != count) return std::nullopt;
  Rows result;
  result.rows.resize(2 * count);
  result.count = static_cast<uint32_t>(count);
  uint64_t granules = 0;
  for (size_t i = 0; i < count; ++i) {
    if (!is_a_pair(masters[i], high[i], low[i], device)) return std::nullopt;
    Row& row = result.rows[i];
    row.address = address_of(masters[i].mutable_data_ptr());
    row.out_address = address_of(high[i].mutable_data_ptr());
    row.numel = static_cast<uint64_t>(masters[i].numel());
    row.first_granule = add_granules(granules, row.numel);
    result.rows[count + i].address = address_of(low[i].mutable_data_ptr());
  }
  result.granules = static_cast<uint32_t>(granules);
  return result;
}

// Runs a kernel over stored weights. Returns false if torch's ops have to do it.
bool run_on_pairs(size_t kernel, List masters, List high, List low) {
  Device* device = device_of(masters);
  if (device == nullptr) return false;
  const std::optional<Rows> rows = pair_rows(masters, high, low, device->device());
  if (!rows) return false;
  const Handle stream = device->stream();
  const SharedTable table = device->table(*rows, stream);
  device->launch(kernel, device->blocks(table->table), stream, table->table);
  return true;
}

void pack_weights_(List masters, List high, List low) {
  const at::AutoDispatchBelowADInplaceOrView below;
  if (!run_on_pairs(kPackWeights, masters, high, low))
    return call_op<pack_weights_>("amp_plugin::_plain_pack_weights_", masters, high, low);
  increment_versions(high);
  increment_versions(low);
}

void unpack_weights_(List high, List low, List masters) {
  const at::AutoDispatchBelowADInplaceOrView below;
  if (!run_on_pairs(kUnpackWeights, masters, high, low))
    return call_op<unpack_weights_>("amp_plugin::_plain_unpack_weights_", high, low, masters);
  increment_versions(masters);
}

}  // namespace

TORCH_LIBRARY_IMPL(amp_plugin, CUDA, m) {
  m.impl("step_", step_);
  m.impl("pack_weights_", pack_weights_);
  m.impl("unpack_weights_", unpack_weights_);
}

}  // namespace amp_plugin::cuda
