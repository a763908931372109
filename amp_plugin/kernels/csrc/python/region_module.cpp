// Python's way in and out of a region; all else is reached through torch.ops.
#include "../may_keep.h"
#include "../region.h"
#include "../region_casts.h"
#include "binding.h"
#include "gradient_ledger.h"
#include "step_tensors.h"

namespace {

using namespace amp_plugin::python;

// enter(owner, opening): (device type, dtype, enabled, cache enabled, rules, ...)
PyObject* enter(PyObject* /*module*/, PyObject* const* arguments, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    PyObject* opening = count == 2 ? arguments[1] : nullptr;
    if (opening == nullptr || !PyTuple_Check(opening) || PyTuple_GET_SIZE(opening) < 5 ||
        !is_dtype(PyTuple_GET_ITEM(opening, 1))) {
      PyErr_SetString(PyExc_TypeError, "enter(owner, (device_type, dtype, enabled, cache_enabled, rules))");
      return nullptr;
    }
    amp_plugin::enter_region(
        arguments[0],
        {.device = static_cast<c10::DeviceType>(PyLong_AsLong(PyTuple_GET_ITEM(opening, 0))),
         .dtype = dtype_of(PyTuple_GET_ITEM(opening, 1)),
         .enabled = PyTuple_GET_ITEM(opening, 2) == Py_True,
         .cache_enabled = PyTuple_GET_ITEM(opening, 3) == Py_True,
         .rules = static_cast<int>(PyLong_AsLong(PyTuple_GET_ITEM(opening, 4)))});
    Py_RETURN_NONE;
  });
}

// exit(owner) -> bool
PyObject* exit(PyObject* /*module*/, PyObject* owner) {
  return guarded([&]() -> PyObject* { return PyBool_FromLong(amp_plugin::exit_region(owner)); });
}

PyObject* forget_casts(PyObject* /*module*/, PyObject* /*unused*/) {
  return guarded([&]() -> PyObject* {
    amp_plugin::forget_all_casts();
    Py_RETURN_NONE;
  });
}

PyObject* refill_test = nullptr;

bool is_refilled(const at::Tensor& tensor) {
  const WithGil gil;
  // Without FSDP nobody refills a weight.
  if (PyDict_GetItemString(PyImport_GetModuleDict(), "torch.distributed.fsdp") == nullptr) return false;
  try {
    const Owned wrapped = to_python(tensor);
    const Owned answer = owned(PyObject_CallOneArg(refill_test, wrapped.get()));
    return PyObject_IsTrue(answer.get()) == 1;
  } catch (const PythonError&) {
    throw_as_cpp("amp_plugin cannot tell whether a weight's cast may be kept");
  }
}

// never_keep(test): a function that returns True for weights whose casts may not be kept
PyObject* never_keep(PyObject* /*module*/, PyObject* test) {
  Py_INCREF(test);
  Py_XSETREF(refill_test, test);
  amp_plugin::set_refill_test(is_refilled);
  Py_RETURN_NONE;
}

PyMethodDef kMethods[] = {
    fast("enter", enter),
    {"exit", exit, METH_O, nullptr},
    {"forget_casts", forget_casts, METH_NOARGS, nullptr},
    {"never_keep", never_keep, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef kModule = {
    PyModuleDef_HEAD_INIT, "_region", nullptr, -1, kMethods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__region() {
  if (!learn_layout()) return nullptr;
  PyObject* module = PyModule_Create(&kModule);
  if (module != nullptr && add_gradient_ledger(module) && add_step_tensors(module)) return module;
  Py_XDECREF(module);
  return nullptr;
}
