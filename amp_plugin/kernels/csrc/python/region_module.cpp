// The Python extension: the way in and out of a region, and what steps read of Python's lists.
#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/DynamicTypes.h>

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

// `opening`: device type, dtype, enabled, cache enabled, rules, ... Returns whether a torch function mode
// is on, and what was found: enabled, dtype, torch's cache flag.
py::tuple enter(const py::tuple& opening) {
  const Region region = enter_region(
      {.device = static_cast<c10::DeviceType>(opening[0].cast<int>()),
       .dtype = opening[1].cast<at::ScalarType>(),
       .enabled = opening[2].ptr() == Py_True,
       .cache_enabled = opening[3].cast<bool>(),
       .rules = opening[4].cast<int>()});
  const auto dtype = py::reinterpret_borrow<py::object>(
      reinterpret_cast<PyObject*>(torch::getTHPDtype(region.previous_dtype)));
  return py::make_tuple(
      at::impl::torch_function_mode_enabled(), region.previous_enabled, dtype, region.previous_cache_enabled);
}

c10::DeviceType device_of(int device) { return static_cast<c10::DeviceType>(device); }

PyObject* refill_test = nullptr;

bool is_refilled_by_fsdp(const at::Tensor& tensor) {
  const py::gil_scoped_acquire gil;
  // Without FSDP nobody refills a weight.
  if (PyDict_GetItemString(PyImport_GetModuleDict(), "torch.distributed.fsdp") == nullptr) return false;
  try {
    return py::handle(refill_test)(tensor).cast<bool>();
  } catch (py::error_already_set& error) {
    error.restore();
    python_error carried;  // torch's, which passes through its code to Python again
    carried.persist();
    throw carried;
  }
}

// `test` returns True for weights whose casts may not be kept.
void never_keep(const py::object& test) {
  Py_XSETREF(refill_test, py::object(test).release().ptr());
  set_refill_test(is_refilled_by_fsdp);
}

// A C++ exception becomes torch's Python error for it.
void translate(std::exception_ptr error) {
  if (error == nullptr) return;
  try {
    std::rethrow_exception(error);
  } catch (const py::builtin_exception&) {
    throw;  // pybind11's own
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
  }
}

}  // namespace
}  // namespace amp_plugin

PYBIND11_MODULE(_region, module) {
  using namespace amp_plugin;
  py::register_local_exception_translator(translate);
  module.def("enter", enter);
  module.def("exit", exit_region);
  module.def("show_rules", [](int device, int rules) { show_rules(device_of(device), rules); });
  module.def("set_default_rules", [](int device, int rules) { set_default_rules(device_of(device), rules); });
  module.def("set_rules", set_rules);
  module.def("uninstall", uninstall);
  module.def("installed", installed);
  module.def("forget_casts", forget_all_casts);
  module.def("kept_cast_count", kept_cast_count);
  module.def("never_keep", never_keep);
  module.attr("MAX_RULE_SETS") = kMaxRuleSets;
  py::class_<LoggedCast>(module, "LoggedCast")
      .def_readonly("op", &LoggedCast::op)
      .def_readonly("device", &LoggedCast::device)
      .def_readonly("before", &LoggedCast::before)
      .def_readonly("after", &LoggedCast::after)
      .def_readonly("argument", &LoggedCast::argument)
      .def_readonly("elements", &LoggedCast::elements)
      .def_readonly("bytes", &LoggedCast::bytes)
      .def_readonly("cached", &LoggedCast::cached)
      .def_readonly("is_weight", &LoggedCast::is_weight)
      .def_readonly("scope", &LoggedCast::scope)
      .def_readonly("tensor", &LoggedCast::tensor);
  module.def("log_casts", log_casts);
  module.def("set_log_scope", set_log_scope);
  module.def("take_cast_log", take_cast_log);
  add_gradient_ledger(module);
  add_step_tensors(module);
}
