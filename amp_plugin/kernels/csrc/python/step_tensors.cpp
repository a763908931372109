// The tensors of a parameter group that one op steps, collected without Python code.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_foreach_copy.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "../cpu_ops.h"
#include "../cuda_layout.h"
#include "../op_calls.h"
#include "../step_rules.h"
#include "../tensor_memory.h"
#include "local_gradient.h"
#include "tensors.h"

namespace amp_plugin {
namespace {

using Column = std::vector<at::Tensor>;
using Number = std::optional<at::Tensor>;

// Why our ops cannot step the tensors of a group. Users see it after "parameter N: ".
struct Obstacle {
  std::string text;
};

void refuse_if(bool unfit, const char* what, const at::Tensor& tensor) {
  if (!unfit) return;
  std::ostringstream text;
  text << what << "is " << tensor.scalar_type() << " of shape " << tensor.sizes() << ", layout "
       << tensor.layout() << ", on " << tensor.device();
  throw Obstacle{text.str()};
}

bool fits(const at::Tensor& tensor, const at::Tensor& param) {
  return is_plain(tensor) && tensor.device() == param.device() && tensor.sizes() == param.sizes();
}

// Return true if several elements share a memory location. Such a tensor cannot be written.
bool is_expanded(const at::Tensor& tensor) {
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.stride(dim) == 0 && tensor.size(dim) > 1) return true;
  }
  return false;
}

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

const at::Tensor& tensor_in(PyObject* holder, py::handle name) {
  PyObject* value = py::detail::dict_getitem(holder, name.ptr());
  if (value == nullptr || value == Py_None)
    throw Obstacle{"has no " + name.cast<std::string>() + " yet, which torch's own step makes"};
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
  if (!same) throw Obstacle{"has a gradient that is not sharded as it is"};
  return local_part(grad);
}

// The tensor that a CompressedState stores; for any other state its local tensor. The state keeps the tensor
// alive.
const at::Tensor& kept_by(const at::Tensor& whole, const at::Tensor& param) {
  const at::Tensor& state = sharding_of(whole) ? local_part(whole) : whole;
  if (!state.key_set().has(c10::DispatchKey::Python)) return state;
  const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(state));
  const bool ordered = param.is_non_overlapping_and_dense() && same_memory_order(param, state);
  if (!ordered || state.sizes() != param.sizes() || !py::hasattr(object, "kept"))
    throw Obstacle{"has a compressed state of another layout"};
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
    if (rests.size() != 0 && rests.size() != params.size())
      throw py::value_error(
          "expected as many rests as parameters or none, got " + std::to_string(rests.size()) + " for " +
          std::to_string(params.size()));
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
        add(own, gradient_of(param, grad), rests.size() == 0 ? nullptr : &rests[i]);
        if (states.empty() && counters.empty()) continue;
        PyObject* entry = entry_of(state, params.object(i));
        if (entry == nullptr || !PyDict_Check(entry))
          throw Obstacle{"has no state yet, which torch's own step makes"};
        add_states(own, entry, states);
        for (size_t k = 0; k < counters.size(); ++k)
          add_counter(own, tensor_in(entry, PyTuple_GET_ITEM(counters.ptr(), k)), k);
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

  // If the op steps masters, the model computes with their rounded values. This rounds the masters again. (A
  // skipped step has changed neither.)
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
      throw py::value_error("parameter " + std::to_string(std::next(twice)->second) + " is there twice");
  }

  void add(const at::Tensor& param, const at::Tensor& grad, const at::Tensor* rest) {
    const bool is_wide = rest != nullptr || param.scalar_type() == at::kFloat;
    const bool has_op = param.device().is_cpu() || param.device().is_cuda();
    refuse_if(!is_plain(param) || !has_op || !is_wide, "", param);
    const at::ScalarType type = grad.scalar_type();
    const bool allowed = type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
    refuse_if(!allowed || !fits(grad, param) || is_expanded(grad), "has a gradient that ", grad);
    refuse_if(
        !params_.empty() && params_[0].device() != param.device(), "is on another device than the first: it ",
        param);
    grads_.push_back(grad);
    if (rest == nullptr) {
      params_.push_back(param);
      return;
    }
    const at::Tensor& beside = *rest;
    const bool is_master = beside.scalar_type() == at::kFloat;
    const bool is_half = beside.scalar_type() == at::kShort && param.scalar_type() == at::kBFloat16;
    refuse_if(!(is_master || is_half) || !fits(beside, param), "is kept with a tensor that ", beside);
    params_.push_back(is_master ? beside : param);
    (is_master ? rounded_ : remainders_).push_back(is_master ? param : beside);
  }

  // All states of a parameter have the format of the first one, except that weights among them are float32.
  void add_states(const at::Tensor& param, PyObject* entry, const py::tuple& names) {
    std::optional<at::ScalarType> format;
    for (size_t k = 0; k < names.size(); ++k) {
      const at::Tensor& tensor = kept_by(tensor_in(entry, PyTuple_GET_ITEM(names.ptr(), k)), param);
      const at::ScalarType type = tensor.scalar_type();
      const bool is_whole = type == at::kFloat && fits(tensor, param);
      const bool is_weight = rule_.states.at(k) == rules::kWeight;
      const bool is_short = type == at::kByte || (type == at::kBFloat16 && fits(tensor, param));
      refuse_if(!is_whole && (is_weight || !is_short), "has a state that ", tensor);
      if (!is_weight && type != format.value_or(type)) throw Obstacle{"has states in several formats"};
      if (!is_weight) format = type;
      states_[k].push_back(tensor);
    }
  }

  // On a GPU, only counters on the device are accepted, as fused=True or capturable=True make them. Any other
  // counter is increased by the host, which does not know whether a step was skipped.
  void add_counter(const at::Tensor& param, const at::Tensor& counter, size_t k) {
    const at::ScalarType type = counter.scalar_type();
    const bool allowed = type == at::kFloat || (k == 0 && type == at::kDouble);
    refuse_if(
        !allowed || counter.numel() != 1 || !is_plain(counter) || counter.device() != param.device(),
        "has a step counter that ", counter);
    counters_[k].push_back(counter);
  }

  // Moves all columns behind the first one. That is the order in which the op takes them.
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
