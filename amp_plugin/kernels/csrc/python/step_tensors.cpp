// The tensors of a parameter group that one op steps, collected without Python code.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_foreach_copy.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../cpu_ops.h"
#include "../cuda_layout.h"
#include "../op_calls.h"
#include "../step_rows.h"
#include "../tensor_memory.h"
#include "local_gradient.h"
#include "tensors.h"

namespace amp_plugin {
namespace {

using Column = std::vector<at::Tensor>;
using Number = std::optional<at::Tensor>;

// Why our op cannot step a parameter. Users see this text after "parameter N ".
struct Obstacle {
  std::string text;
};

// Returns a parameter's entry in an optimizer's state (a borrowed reference), or null if there is none.
// Tensor.__hash__ is Python code that returns the tensor's address. We pass that address as the hash, so the
// dict need not call it.
PyObject* entry_of(const py::dict& state, PyObject* param) {
#if PY_VERSION_HEX < 0x030D0000  // a private function; its source was checked up to Python 3.12
  PyObject* entry = _PyDict_GetItem_KnownHash(state.ptr(), param, reinterpret_cast<Py_hash_t>(param));
  if (entry != nullptr) return entry;
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
#endif
  return py::detail::dict_getitem(state.ptr(), param);
}

const at::Tensor& tensor_in(PyObject* entry, py::handle name) {
  if (entry == nullptr || !PyDict_Check(entry))
    throw Obstacle{"has no state yet; torch's own step creates it"};
  PyObject* value = py::detail::dict_getitem(entry, name.ptr());
  if (value == nullptr || value == Py_None)
    throw Obstacle{"has no " + name.cast<std::string>() + " yet; torch's own step creates it"};
  if (!python::is_tensor(value))
    throw Obstacle{"has a state " + name.cast<std::string>() + " that is not a tensor"};
  return THPVariable_Unpack(value);
}

// The tensor that a step writes: the local tensor of a DTensor, the 16 bits of a StoredShard.
const at::Tensor& memory_of(const at::Tensor& param) {
  const at::Tensor& local = sharding_of(param) ? local_part(param) : param;
  if (!is_python(local)) return local;
  const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(local));
  return py::hasattr(object, "weight_16") ? THPVariable_Unpack(object.attr("weight_16").ptr()) : local;
}

// The local gradient of a parameter. It must be sharded as the parameter is.
const at::Tensor& gradient_of(const at::Tensor& param, const at::Tensor& grad) {
  const std::optional<Sharding> own = sharding_of(param);
  if (!own) return grad;
  const std::optional<Sharding> other = sharding_of(grad);
  const bool same = other &&
      (own->spec.is(other->spec) ||
       (own->mesh.equal(other->mesh) && own->placements.equal(other->placements)));
  if (!same) throw Obstacle{"has a gradient that is not sharded in the same way"};
  return local_part(grad);
}

// Returns the tensor that a CompressedState stores. For any other state, returns its local tensor. The state
// keeps the returned tensor alive.
const at::Tensor& kept_by(const at::Tensor& whole, const at::Tensor& param) {
  const at::Tensor& state = sharding_of(whole) ? local_part(whole) : whole;
  if (!state.key_set().has(c10::DispatchKey::Python)) return state;
  const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(state));
  const bool ordered = param.is_non_overlapping_and_dense() && same_memory_order(param, state);
  if (!ordered || state.sizes() != param.sizes() || !py::hasattr(object, "kept"))
    throw Obstacle{"has a compressed state whose shape or strides differ from its own"};
  return THPVariable_Unpack(object.attr("kept").ptr());
}

class StepTensors {
 public:
  // `states` and `counters` are keys of a parameter's entry in `state`, as many as the rule needs. `rests` is
  // empty, or has one tensor for each parameter in 16 bits: its low half (int16) or its float32 master.
  StepTensors(
      const std::string& rule, size_t numbers, const py::list& all, const py::list& all_rests,
      const py::dict& state, const py::tuple& states, const py::tuple& counters)
      : rule_(step_rule(rule, numbers)) {
    python::Tensors params(all), rests(all_rests);
    TORCH_CHECK_VALUE(
        rests.size() == 0 || rests.size() == params.size(), "got ", rests.size(),
        " remainders or masters for ", params.size(), " parameters; give one for each parameter, or none");
    TORCH_CHECK_VALUE(
        states.size() == rule_.states.size() && counters.size() == rule_.counters, rule, ": ", states.size(),
        " states and ", counters.size(), " counters; give ", rule_.states.size(), " and ", rule_.counters);
    reserve(params.size(), states.size(), counters.size());
    std::vector<std::pair<const void*, size_t>> places;  // of each parameter that has a gradient
    places.reserve(params.size());
    for (size_t i = 0; i < params.size(); ++i) {
      const at::Tensor& param = params[i];
      const at::Tensor& grad = param.unsafeGetTensorImpl()->grad();
      if (!grad.defined()) continue;
      places.emplace_back(param.unsafeGetTensorImpl(), i);
      try {
        const at::Tensor& own = memory_of(param);
        ParameterTensors given{.param = &own, .grad = &gradient_of(param, grad)};
        const bool is_master = rests.size() != 0 && rests[i].scalar_type() == at::kFloat;
        if (rests.size() != 0) (is_master ? given.param : given.remainder) = &rests[i];
        PyObject* entry = states.empty() && counters.empty() ? nullptr : entry_of(state, params.object(i));
        for (size_t k = 0; k < states.size(); ++k)
          given.states.at(k) = &kept_by(tensor_in(entry, PyTuple_GET_ITEM(states.ptr(), k)), own);
        for (size_t k = 0; k < counters.size(); ++k)
          given.counters.at(k) = &tensor_in(entry, PyTuple_GET_ITEM(counters.ptr(), k));
        add(given, is_master ? &own : nullptr);
      } catch (const Obstacle& obstacle) {
        throw py::value_error("parameter " + std::to_string(i) + " " + obstacle.text);
      }
    }
    refuse_repeated(places);
    join(states_);
    join(counters_);
  }

  size_t size() const { return params_.size(); }
  const Column& params() const { return params_; }
  const Column& grads() const { return grads_; }
  const Column& states() const { return states_[0]; }
  const Column& remainders() const { return remainders_; }

  void step_(
      const std::vector<double>& numbers, const Number& lr, const Number& grad_scale,
      const Number& found_inf) const {
    const py::gil_scoped_release others_may_run;
    const at::AutoDispatchBelowAutograd below;
    call_op<amp_plugin::step_>(
        "amp_plugin::step_", params_, grads_, states_[0], counters_[0], remainders_, rule_.name, numbers, lr,
        grad_scale, found_inf);
    round_masters();
  }

  // If the op steps float32 masters, the model computes with rounded copies of them. This function updates
  // the copies. (If the step was skipped, the copies do not change.)
  void round_masters() const {
    if (!rounded_.empty()) at::_foreach_copy_(rounded_, params_);
  }

 private:
  // With many small parameters, a vector that grows takes as long as the step of some of them.
  void reserve(size_t count, size_t states, size_t counters) {
    params_.reserve(count);
    grads_.reserve(count);
    for (size_t k = 0; k < states; ++k) states_[k].reserve(k == 0 ? count * states : count);
    for (size_t k = 0; k < counters; ++k) counters_[k].reserve(k == 0 ? count * counters : count);
  }

  static void refuse_repeated(std::vector<std::pair<const void*, size_t>>& places) {
    std::ranges::sort(places);
    const auto same = [](const auto& one, const auto& other) { return one.first == other.first; };
    const auto twice = std::ranges::adjacent_find(places, same);
    if (twice != places.end())
      throw py::value_error("parameter " + std::to_string(std::next(twice)->second) + " is listed twice");
  }

  // Adds a parameter, or a float32 master and the weights `rounded` that the model computes with.
  void add(const ParameterTensors& given, const at::Tensor* rounded) {
    const at::Tensor& param = *given.param;
    if (!param.device().is_cpu() && !param.device().is_cuda())
      throw Obstacle{"is on " + param.device().str() + ", not on the CPU or CUDA"};
    if (rounded != nullptr && (rounded->sizes() != param.sizes() || rounded->device() != param.device()))
      throw Obstacle{"has a float32 master of another shape or on another device"};
    std::string text = obstacle_of(given, rule_, params_.empty() ? param.device() : params_[0].device());
    if (!text.empty()) throw Obstacle{std::move(text)};
    params_.push_back(param);
    grads_.push_back(*given.grad);
    if (given.remainder != nullptr) remainders_.push_back(*given.remainder);
    if (rounded != nullptr) rounded_.push_back(*rounded);
    for (size_t k = 0; k < rule_.states.size(); ++k) states_[k].push_back(*given.states[k]);
    for (size_t k = 0; k < rule_.counters; ++k) counters_[k].push_back(*given.counters[k]);
  }

  // Appends all columns to the first one, because the op takes them as one list.
  template <size_t count>
  static void join(std::array<Column, count>& columns) {
    for (size_t k = 1; k < count; ++k) std::ranges::move(columns[k], std::back_inserter(columns[0]));
  }

  const StepRule& rule_;
  Column params_;
  Column grads_;
  Column remainders_;
  Column rounded_;  // the rounded weights of the model, if params_ are its masters
  std::array<Column, cuda::kMostStates> states_;
  std::array<Column, cuda::kMostCounters> counters_;
};

}  // namespace

void add_step_tensors(py::module_& module) {
  module.def("step_rules", described_rules);
  py::class_<StepTensors>(module, "StepTensors")
      .def(
          py::init<
              const std::string&, size_t, const py::list&, const py::list&, const py::dict&, const py::tuple&,
              const py::tuple&>())
      .def("__len__", &StepTensors::size)
      .def_property_readonly("params", &StepTensors::params)
      .def_property_readonly("grads", &StepTensors::grads)
      .def_property_readonly("states", &StepTensors::states)
      .def_property_readonly("remainders", &StepTensors::remainders)
      .def("round_masters", &StepTensors::round_masters)
      .def("step_", &StepTensors::step_);
}

}  // namespace amp_plugin
