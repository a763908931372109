// Python's way in and out of a region; all else is reached through torch.ops.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <memory>

#include "../kept_casts.h"
#include "../region.h"
#include "../weight_cache.h"
#include "gradient_ledger.h"

namespace {

using Kept = std::shared_ptr<amp_plugin::KeptCasts>;
constexpr const char* kKeptCasts = "amp_plugin.KeptCasts";

void destroy_kept(PyObject* capsule) { delete static_cast<Kept*>(PyCapsule_GetPointer(capsule, kKeptCasts)); }

Kept* kept_of(PyObject* capsule) { return static_cast<Kept*>(PyCapsule_GetPointer(capsule, kKeptCasts)); }

// enter(owner, opening): (device type, dtype, enabled, cache enabled, rules, kept casts, ...)
PyObject* enter(PyObject* /*module*/, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  PyObject* opening = count == 2 ? arguments[1] : nullptr;
  if (opening == nullptr || !PyTuple_Check(opening) || PyTuple_GET_SIZE(opening) < 6 ||
      !THPDtype_Check(PyTuple_GET_ITEM(opening, 1))) {
    PyErr_SetString(
        PyExc_TypeError, "enter(owner, (device_type, dtype, enabled, cache_enabled, rules, kept))");
    return nullptr;
  }
  Kept kept;
  if (PyObject* capsule = PyTuple_GET_ITEM(opening, 5); capsule != Py_None) {
    const Kept* held = kept_of(capsule);
    if (held == nullptr) return nullptr;
    kept = *held;
  }
  amp_plugin::enter_region(
      arguments[0],
      {.device = static_cast<c10::DeviceType>(PyLong_AsLong(PyTuple_GET_ITEM(opening, 0))),
       .dtype = reinterpret_cast<THPDtype*>(PyTuple_GET_ITEM(opening, 1))->scalar_type,
       .enabled = PyTuple_GET_ITEM(opening, 2) == Py_True,
       .cache_enabled = PyTuple_GET_ITEM(opening, 3) == Py_True,
       .rules = static_cast<int>(PyLong_AsLong(PyTuple_GET_ITEM(opening, 4))),
       .kept = std::move(kept)});
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// exit(owner) -> bool
PyObject* exit(PyObject* /*module*/, PyObject* owner) {
  HANDLE_TH_ERRORS
  return PyBool_FromLong(amp_plugin::exit_region(owner));
  END_HANDLE_TH_ERRORS
}

PyObject* new_kept_casts(PyObject* /*module*/, PyObject* /*unused*/) {
  HANDLE_TH_ERRORS
  return PyCapsule_New(new Kept(std::make_shared<amp_plugin::KeptCasts>()), kKeptCasts, destroy_kept);
  END_HANDLE_TH_ERRORS
}

PyObject* clear_kept_casts(PyObject* /*module*/, PyObject* capsule) {
  HANDLE_TH_ERRORS
  const Kept* kept = kept_of(capsule);
  if (kept == nullptr) return nullptr;
  {
    const pybind11::gil_scoped_release others_may_run;  // whoever casts holds the lock, and may need Python
    (*kept)->clear();
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// kept_casts_counts(kept) -> (buffers, bytes, casts, multi-tensor casts)
PyObject* kept_casts_counts(PyObject* /*module*/, PyObject* capsule) {
  HANDLE_TH_ERRORS
  const Kept* kept = kept_of(capsule);
  if (kept == nullptr) return nullptr;
  long long buffers = 0, bytes = 0;
  {
    const pybind11::gil_scoped_release others_may_run;
    buffers = (*kept)->buffers();
    bytes = (*kept)->bytes();
  }
  return Py_BuildValue(
      "LLLL", buffers, bytes, static_cast<long long>((*kept)->casts()),
      static_cast<long long>((*kept)->refreshes()));
  END_HANDLE_TH_ERRORS
}

PyObject* managed_test = nullptr;

// FSDP2 shows plain leaf parameters whose memory it frees and refills with no version counter moving.
bool is_managed_by_fsdp(const at::Tensor& tensor) {
  const pybind11::gil_scoped_acquire gil;
  PyObject* modules = PyImport_GetModuleDict();
  if (PyDict_GetItemString(modules, "torch.distributed.fsdp") == nullptr || managed_test == nullptr)
    return false;
  auto wrapped = THPObjectPtr(THPVariable_Wrap(tensor));
  auto answer = THPObjectPtr(PyObject_CallOneArg(managed_test, wrapped.get()));
  if (!answer) throw python_error();
  return PyObject_IsTrue(answer.get()) == 1;
}

// set_managed_test(callable)
PyObject* set_managed_test(PyObject* /*module*/, PyObject* callable) {
  Py_INCREF(callable);
  Py_XSETREF(managed_test, callable);
  amp_plugin::set_managed_test(is_managed_by_fsdp);
  Py_RETURN_NONE;
}

PyMethodDef kMethods[] = {
    {"enter", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(enter)), METH_FASTCALL, nullptr},
    {"exit", exit, METH_O, nullptr},
    {"set_managed_test", set_managed_test, METH_O, nullptr},
    {"new_kept_casts", new_kept_casts, METH_NOARGS, nullptr},
    {"clear_kept_casts", clear_kept_casts, METH_O, nullptr},
    {"kept_casts_counts", kept_casts_counts, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef kModule = {
    PyModuleDef_HEAD_INIT, "_region", nullptr, -1, kMethods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__region() {
  auto module = THPObjectPtr(PyModule_Create(&kModule));
  if (!module || !add_gradient_ledger(module.get())) return nullptr;
  return module.release();
}
