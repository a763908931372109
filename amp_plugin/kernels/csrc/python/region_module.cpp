// The Python extension: the way in and out of a region, and what steps read of Python's lists.
#include <ATen/PythonTorchFunctionTLS.h>

#include "../region.h"
#include "../region_casts.h"
#include "tensors.h"

namespace amp_plugin {

void add_gradient_ledger(py::module_& module);
void add_step_tensors(py::module_& module);

namespace {

// `opening`: device type, dtype, enabled, cache enabled, rules, ... Returns whether a torch function mode
// is on.
bool enter(py::handle owner, const py::tuple& opening) {
  enter_region(
      owner.ptr(),
      {.device = static_cast<c10::DeviceType>(opening[0].cast<int>()),
       .dtype = opening[1].cast<at::ScalarType>(),
       .enabled = opening[2].ptr() == Py_True,
       .cache_enabled = opening[3].cast<bool>(),
       .rules = opening[4].cast<int>()});
  return at::impl::torch_function_mode_enabled();
}

// The device type and number of a rule set, for code that no region of ours is open in: compiled graphs.
void show(int device, int rules) { show_rules(static_cast<c10::DeviceType>(device), rules); }

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
  module.def("exit", [](py::handle owner) { return exit_region(owner.ptr()); });
  module.def("show_rules", show);
  module.def("forget_casts", forget_all_casts);
  module.def("never_keep", never_keep);
  add_gradient_ledger(module);
  add_step_tensors(module);
}
