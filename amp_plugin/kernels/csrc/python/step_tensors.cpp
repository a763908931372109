// The tensors that one op steps: a parameter group's, looked up without Python code.

#include "step_tensors.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <optional>
#include <sstream>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "direct_call.h"

namespace amp_plugin {
namespace {

namespace py = pybind11;
using Tensors = std::vector<at::Tensor>;
using Number = std::optional<at::Tensor>;

constexpr size_t kMostStates = 3;

// Why the tensors of a group are not for our ops; told to users after "parameter N: ".
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

// The entry of a parameter in an optimizer's state, borrowed; null if there is none. Tensor.__hash__ is
// Python code that returns the tensor's address: where it is known, the dict does not have to ask.
PyObject* entry_of(PyObject* state, PyObject* param) {
  PyObject* entry = _PyDict_GetItem_KnownHash(state, param, reinterpret_cast<Py_hash_t>(param));
  if (entry == nullptr && PyErr_Occurred() == nullptr) entry = PyDict_GetItemWithError(state, param);
  if (entry == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return entry;
}

const at::Tensor& tensor_in(PyObject* holder, PyObject* name) {
  PyObject* value = PyDict_GetItemWithError(holder, name);
  if (value == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  if (value == nullptr || value == Py_None)
    throw Obstacle{"has no " + py::str(name).cast<std::string>() + " yet, which torch's own step makes"};
  if (!THPVariable_Check(value))
    throw Obstacle{"has a state " + py::str(name).cast<std::string>() + " that is no tensor"};
  return THPVariable_Unpack(value);
}

Number number(const py::object& given) {
  return given.is_none() ? Number{} : Number{THPVariable_Unpack(given.ptr())};
}

class StepTensors {
 public:
  // `states` are names of tensors like the parameter in its entry of `state`; `counted` adds "step". `rests`
  // is empty, or holds what is kept beside each parameter in 16 bits: its low half (int16) or its master.
  StepTensors(
      const py::list& params, const py::list& rests, const py::dict& state, const py::tuple& states,
      bool counted) {
    const py::str step("step");
    std::unordered_set<const void*> seen;
    for (size_t i = 0; i < params.size(); ++i) {
      PyObject* object = PyList_GET_ITEM(params.ptr(), i);
      const at::Tensor& param = THPVariable_Unpack(object);
      const at::Tensor& grad = param.unsafeGetTensorImpl()->grad();
      if (!grad.defined()) continue;
      try {
        if (!seen.insert(param.unsafeGetTensorImpl()).second) throw Obstacle{"is there twice"};
        add(param, grad, rests.empty() ? nullptr : PyList_GET_ITEM(rests.ptr(), i));
        if (states.empty() && !counted) continue;
        PyObject* entry = entry_of(state.ptr(), object);
        if (entry == nullptr || !PyDict_Check(entry))
          throw Obstacle{"has no state yet, which torch's own step makes"};
        add_states(param, entry, states);
        if (counted) add_counter(param, tensor_in(entry, step.ptr()));
      } catch (const Obstacle& obstacle) {
        throw py::value_error("parameter " + std::to_string(i) + " " + obstacle.text);
      }
    }
  }

  size_t size() const { return params_.size(); }

  void adam_(
      double lr, double beta1, double beta2, double eps, double weight_decay, bool decoupled, bool maximize,
      const py::object& lr_tensor, const py::object& grad_scale, const py::object& found_inf) const {
    using List = at::TensorList;
    using Signature = void(
        List, List, List, List, List, List, List, List, double, double, double, double, double, bool, bool,
        const Number&, const Number&, const Number&);
    static const auto op = find_op<Signature>("amp_plugin::adam_");
    const Number rate = number(lr_tensor), scale = number(grad_scale), found = number(found_inf);
    const py::gil_scoped_release others_may_run;
    const at::AutoDispatchBelowAutograd below;
    op.call(
        params_, grads_, states_[0], states_[1], states_[2], steps_, remainders_, copies_, lr, beta1, beta2,
        eps, weight_decay, decoupled, maximize, rate, scale, found);
  }

  void sgd_(
      double lr, double momentum, double dampening, double weight_decay, bool nesterov, bool maximize,
      const py::object& lr_tensor, const py::object& grad_scale, const py::object& found_inf) const {
    using List = at::TensorList;
    using Signature = void(
        List, List, List, List, List, double, double, double, double, bool, bool, bool, const Number&,
        const Number&, const Number&);
    static const auto op = find_op<Signature>("amp_plugin::sgd_");
    const Number rate = number(lr_tensor), scale = number(grad_scale), found = number(found_inf);
    const py::gil_scoped_release others_may_run;
    const at::AutoDispatchBelowAutograd below;
    op.call(
        params_, grads_, states_[0], remainders_, copies_, lr, momentum, dampening, weight_decay, nesterov,
        maximize, false, rate, scale, found);
  }

 private:
  void add(const at::Tensor& param, const at::Tensor& grad, PyObject* rest) {
    const bool is_wide = rest != nullptr || param.scalar_type() == at::kFloat;
    const bool has_op = param.device().is_cpu() || param.device().is_cuda();
    refuse_if(!is_plain(param) || !has_op || !is_wide, "", param);
    const at::ScalarType type = grad.scalar_type();
    const bool allowed = type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
    refuse_if(!allowed || !fits(grad, param), "has a gradient that ", grad);
    refuse_if(
        !params_.empty() && params_[0].device() != param.device(), "is on another device than the first: it ",
        param);
    grads_.push_back(grad);
    if (rest == nullptr) {
      params_.push_back(param);
      return;
    }
    const at::Tensor& beside = THPVariable_Unpack(rest);
    const bool is_master = beside.scalar_type() == at::kFloat;
    const bool is_half = beside.scalar_type() == at::kShort && param.scalar_type() == at::kBFloat16;
    refuse_if(!(is_master || is_half) || !fits(beside, param), "is kept with a tensor that ", beside);
    params_.push_back(is_master ? beside : param);
    (is_master ? copies_ : remainders_).push_back(is_master ? param : beside);
  }

  void add_states(const at::Tensor& param, PyObject* entry, const py::tuple& names) {
    for (size_t i = 0; i < names.size(); ++i) {
      const at::Tensor& tensor = tensor_in(entry, PyTuple_GET_ITEM(names.ptr(), i));
      refuse_if(tensor.scalar_type() != at::kFloat || !fits(tensor, param), "has a state that ", tensor);
      states_.at(i).push_back(tensor);
    }
  }

  // On a GPU that of fused=True and capturable=True: any other is counted by the host, which does not know of
  // skipped steps.
  void add_counter(const at::Tensor& param, const at::Tensor& step) {
    const bool allowed = step.scalar_type() == at::kFloat || step.scalar_type() == at::kDouble;
    refuse_if(
        !allowed || step.numel() != 1 || !is_plain(step) || step.device() != param.device(),
        "has a step counter that ", step);
    steps_.push_back(step);
  }

  Tensors params_;
  Tensors grads_;
  Tensors steps_;
  Tensors remainders_;
  Tensors copies_;
  std::array<Tensors, kMostStates> states_;
};

}  // namespace
}  // namespace amp_plugin

bool add_step_tensors(PyObject* module) {
  using amp_plugin::StepTensors;
  namespace py = pybind11;
  try {
    py::class_<StepTensors>(py::reinterpret_borrow<py::module_>(module), "StepTensors")
        .def(py::init<const py::list&, const py::list&, const py::dict&, const py::tuple&, bool>())
        .def("__len__", &StepTensors::size)
        .def("adam_", &StepTensors::adam_)
        .def("sgd_", &StepTensors::sgd_);
    return true;
  } catch (py::error_already_set& error) {
    error.restore();
    return false;
  }
}
