// Optimizer steps and stored weights on CUDA tensors. Each op is one launch and never waits for the device.

#include <algorithm>
#include <optional>

#include "one_value.h"
#include "served_ops.h"
#include "step_rows.h"
#include "stored_weights.h"

namespace amp_plugin::cuda {
namespace {

using Number = std::optional<at::Tensor>;
using List = at::TensorList;

uint64_t address_of(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

// Gives granules to the first row of a parameter. A granule is kGranuleElements elements of each of the
// parameter's tensors.
void give_granules(Rows& rows, Row& row) {
  rows.give(row, (row.numel + kGranuleElements - 1) / kGranuleElements);
}

static_assert(
    kStateBFloat16 == static_cast<int>(State::bfloat16) && kStateCodes == static_cast<int>(State::codes));

// The rows of a step, in the layout that cuda/step_rows.cuh describes.
Rows table_rows(const StepRows& parameters, const StepLists& tensors, const StepRule& rule) {
  const size_t count = parameters.rows().size();
  Rows result(count, 4);
  for (size_t i = 0; i < count; ++i) {
    const amp_plugin::Row& parameter = parameters.rows()[i];
    Row& first = result.rows[i];
    first.address = address_of(parameter.grad);
    first.out_address = address_of(parameter.param);
    first.numel = static_cast<uint64_t>(parameter.numel);
    give_granules(result, first);
    first.dtype = code_of(parameter.grad_type);
    first.out_dtype = parameter.is_pair ? kBFloat16 : kFloat32;
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
  return result;
}

void step_(
    c10::Device on, List params, List grads, List states, List counters, List remainders,
    c10::string_view name, at::ArrayRef<double> numbers, const Number& lr, const Number& grad_scale,
    const Number& found_inf) {
  Device& device = *Device::find(on.index());
  const StepRule& rule = step_rule(name, numbers.size());
  const StepLists tensors{params, grads, states, counters, remainders};
  const StepRows rows(tensors, rule, grad_scale.has_value(), on);
  StepNumbers given{};
  std::copy(numbers.begin(), numbers.end(), given.value);
  const Handle stream = device.stream();
  const SharedTable table = device.table(table_rows(rows, tensors, rule), stream);
  device.launch_on(
      table->table, stream, "step " + std::string(rule.name), given, optional_scalar(lr, "lr", on),
      optional_scalar(grad_scale, "grad_scale", on), optional_scalar(found_inf, "found_inf", on));
  rows.finish();
}

// Launches a kernel over stored weights. The rows are those of for_each_pair() in cuda/step_rows.cuh.
void launch_on_weights(c10::Device on, const char* kernel, const StoredWeights& weights) {
  const List masters = weights.masters.tensors();
  const size_t count = masters.size();
  Rows rows(count, 2);
  for (size_t i = 0; i < count; ++i) {
    Row& row = rows.rows[i];
    row.address = address_of(masters[i].mutable_data_ptr());
    row.out_address = address_of(weights.high.tensors()[i].mutable_data_ptr());
    row.numel = static_cast<uint64_t>(masters[i].numel());
    give_granules(rows, row);
    rows.rows[count + i].address = address_of(weights.low.tensors()[i].mutable_data_ptr());
  }
  Device& device = *Device::find(on.index());
  const Handle stream = device.stream();
  device.launch_on(device.table(rows, stream)->table, stream, kernel);
}

void pack_weights_(c10::Device on, List masters, List high, List low) {
  const StoredWeights weights("pack_weights_", masters, high, low);
  launch_on_weights(on, "pack_weights", weights);
  weights.high.finish();
  weights.low.finish();
}

void unpack_weights_(c10::Device on, List high, List low, List masters) {
  const StoredWeights weights("unpack_weights_", masters, high, low);
  launch_on_weights(on, "unpack_weights", weights);
  weights.masters.finish();
}

}  // namespace

TORCH_LIBRARY_IMPL(amp_plugin, CUDA, library) {
  add_op(library, "step_", step_);
  add_op(library, "pack_weights_", pack_weights_);
  add_op(library, "unpack_weights_", unpack_weights_);
}

}  // namespace amp_plugin::cuda
