// The Python extension. It enters and leaves regions, and defines the classes that read tensors from Python
// lists.
#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <array>

#include "../cast_log.h"
#include "../install.h"
#include "../region.h"
#include "../region_casts.h"
#include "../rules_in_force.h"
#include "tensors.h"

namespace amp_plugin {

void add_gradient_ledger(py::module_& module);
void add_step_tensors(py::module_& module);

namespace {

// Runs `body`. A C++ exception becomes the Python error that torch raises for it.
template <typename Body>
PyObject* with_errors_of_torch(const Body& body) {
  try {
    return body();
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

PyObject* borrowed(bool value) { return value ? Py_True : Py_False; }

// `opening` is a tuple: device type, dtype, enabled, cache enabled, rules, ... Returns whether a torch
// function mode is on, and the previous state: enabled, dtype, torch's cache flag.
PyObject* enter(PyObject* /*module*/, PyObject* opening) {
  return with_errors_of_torch([&] {
    const auto item = [&](Py_ssize_t place) { return PyTuple_GET_ITEM(opening, place); };
    const Region region = enter_region(
        {.device = static_cast<c10::DeviceType>(PyLong_AsLong(item(0))),
         .dtype = reinterpret_cast<THPDtype*>(item(1))->scalar_type,
         .enabled = item(2) == Py_True,
         .cache_enabled = item(3) == Py_True,
         .rules = static_cast<int>(PyLong_AsLong(item(4)))});
    return PyTuple_Pack(
        4, borrowed(at::impl::torch_function_mode_enabled()), borrowed(region.previous_enabled),
        torch::getTHPDtype(region.previous_dtype), borrowed(region.previous_cache_enabled));
  });
}

PyObject* leave(PyObject* /*module*/, PyObject* from_innermost) {
  return with_errors_of_torch([&] {
    exit_region(PyLong_AsSize_t(from_innermost));
    return Py_NewRef(Py_None);
  });
}

// Every region calls these two functions. A call through pybind11 would take longer than the functions
// themselves.
std::array<PyMethodDef, 3> ways_in_and_out{{
    {"enter", enter, METH_O, "Open a region; return what was found."},
    {"exit", leave, METH_O, "Close the region that is so many places from the innermost."},
    {nullptr, nullptr, 0, nullptr},
}};

c10::DeviceType device_of(int device) { return static_cast<c10::DeviceType>(device); }

PyObject* refill_test = nullptr;

bool is_refilled_by_fsdp(const at::Tensor& tensor) {
  const py::gil_scoped_acquire gil;
  // Only FSDP refills weights. If it was never imported, no weight is refilled.
  if (PyDict_GetItemString(PyImport_GetModuleDict(), "torch.distributed.fsdp") == nullptr) return false;
  try {
    return py::handle(refill_test)(tensor).cast<bool>();
  } catch (py::error_already_set& error) {
    error.restore();
    python_error carried;  // torch's exception type, which torch's C++ code passes on to Python
    carried.persist();
    throw carried;
  }
}

// Sets the test that returns True for weights whose casts must not be kept.
void never_keep(const py::object& test) {
  Py_XSETREF(refill_test, py::object(test).release().ptr());
  set_refill_test(is_refilled_by_fsdp);
}

// Translates a C++ exception to the Python error that torch raises for it.
void translate(std::exception_ptr error) {
  if (error == nullptr) return;
  try {
    std::rethrow_exception(error);
  } catch (const py::builtin_exception&) {
    throw;  // an exception of pybind11, which pybind11 translates
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
  }
}

}  // namespace
}  // namespace amp_plugin

PYBIND11_MODULE(_region, module) {
  using namespace amp_plugin;
  py::register_local_exception_translator(translate);
  if (PyModule_AddFunctions(module.ptr(), ways_in_and_out.data()) != 0) throw py::error_already_set();
  module.def("show_rules", [](int device, int rules) { show_rules(device_of(device), rules); });
  module.def("set_default_rules", [](int device, int rules) { set_default_rules(device_of(device), rules); });
  module.def("set_rules", set_rules);
  module.def("uninstall", uninstall);
  module.def("forget_casts", forget_all_casts);
  module.def("kept_cast_count", kept_cast_count);
  module.def("never_keep", never_keep);
  module.attr("MAX_RULE_SETS") = kMaxRuleSets;
  module.def("log_casts", log_casts);
  module.def("set_log_scope", set_log_scope);
  module.def("take_cast_log", take_cast_log);
  add_gradient_ledger(module);
  add_step_tensors(module);
}
