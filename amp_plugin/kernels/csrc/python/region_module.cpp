// Python's way in and out of a region; all else is reached through torch.ops.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <memory>

#include "../may_keep.h"
#include "../region.h"
#include "../weights_epoch.h"
#include "../window_casts.h"
#include "gradient_ledger.h"
#include "step_tensors.h"

namespace {

using SharedCasts = std::shared_ptr<amp_plugin::WindowCasts>;
constexpr const char* kWindowCasts = "amp_plugin.WindowCasts";

void destroy_casts(PyObject* capsule) {
  delete static_cast<SharedCasts*>(PyCapsule_GetPointer(capsule, kWindowCasts));
}

SharedCasts* casts_in(PyObject* capsule) {
  return static_cast<SharedCasts*>(PyCapsule_GetPointer(capsule, kWindowCasts));
}

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
  SharedCasts kept;
  if (PyObject* capsule = PyTuple_GET_ITEM(opening, 5); capsule != Py_None) {
    const SharedCasts* held = casts_in(capsule);
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

PyObject* invalidate(PyObject* /*module*/, PyObject* /*unused*/) {
  HANDLE_TH_ERRORS
  amp_plugin::invalidate_weight_casts();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* new_casts(PyObject* /*module*/, PyObject* /*unused*/) {
  HANDLE_TH_ERRORS
  return PyCapsule_New(
      new SharedCasts(std::make_shared<amp_plugin::WindowCasts>()), kWindowCasts, destroy_casts);
  END_HANDLE_TH_ERRORS
}

PyObject* clear_casts(PyObject* /*module*/, PyObject* capsule) {
  HANDLE_TH_ERRORS
  const SharedCasts* casts = casts_in(capsule);
  if (casts == nullptr) return nullptr;
  {
    const pybind11::gil_scoped_release others_may_run;  // whoever casts holds the lock, and may need Python
    (*casts)->clear();
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* end_window(PyObject* /*module*/, PyObject* capsule) {
  HANDLE_TH_ERRORS
  const SharedCasts* casts = casts_in(capsule);
  if (casts == nullptr) return nullptr;
  (*casts)->end_window();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// count_casts(casts) -> (buffers, bytes, casts, multi-tensor casts)
PyObject* count_casts(PyObject* /*module*/, PyObject* capsule) {
  HANDLE_TH_ERRORS
  const SharedCasts* casts = casts_in(capsule);
  if (casts == nullptr) return nullptr;
  long long buffers = 0, bytes = 0;
  {
    const pybind11::gil_scoped_release others_may_run;
    buffers = (*casts)->buffers();
    bytes = (*casts)->bytes();
  }
  return Py_BuildValue(
      "LLLL", buffers, bytes, static_cast<long long>((*casts)->casts()),
      static_cast<long long>((*casts)->refreshes()));
  END_HANDLE_TH_ERRORS
}

PyObject* parameter_class = nullptr;
PyObject* managed_test = nullptr;

// Only parameters outlive a region. FSDP2 shows plain leaf parameters whose memory it frees and refills
// with no version counter moving.
amp_plugin::Lifetime lifetime_of_casts(const at::Tensor& tensor) {
  using amp_plugin::Lifetime;
  const pybind11::gil_scoped_acquire gil;
  auto wrapped = THPObjectPtr(THPVariable_Wrap(tensor));
  if (!wrapped) throw python_error();
  const int is_parameter = PyObject_IsInstance(wrapped.get(), parameter_class);
  if (is_parameter < 0) throw python_error();
  if (is_parameter == 0) return Lifetime::kRegion;
  if (PyDict_GetItemString(PyImport_GetModuleDict(), "torch.distributed.fsdp") == nullptr) {
    return Lifetime::kWindow;
  }
  auto answer = THPObjectPtr(PyObject_CallOneArg(managed_test, wrapped.get()));
  if (!answer) throw python_error();
  return PyObject_IsTrue(answer.get()) == 1 ? Lifetime::kNone : Lifetime::kWindow;
}

// keep_only(parameter class, managed test): what may outlive a region, and what may not be kept in it
PyObject* keep_only(PyObject* /*module*/, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "keep_only(parameter_class, managed_test)");
    return nullptr;
  }
  Py_INCREF(arguments[0]);
  Py_XSETREF(parameter_class, arguments[0]);
  Py_INCREF(arguments[1]);
  Py_XSETREF(managed_test, arguments[1]);
  amp_plugin::set_lifetime_test(lifetime_of_casts);
  Py_RETURN_NONE;
}

template <PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)>
PyCFunction fast() {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef kMethods[] = {
    {"enter", fast<enter>(), METH_FASTCALL, nullptr},
    {"exit", exit, METH_O, nullptr},
    {"invalidate", invalidate, METH_NOARGS, nullptr},
    {"keep_only", fast<keep_only>(), METH_FASTCALL, nullptr},
    {"new_casts", new_casts, METH_NOARGS, nullptr},
    {"clear_casts", clear_casts, METH_O, nullptr},
    {"end_window", end_window, METH_O, nullptr},
    {"count_casts", count_casts, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef kModule = {
    PyModuleDef_HEAD_INIT, "_region", nullptr, -1, kMethods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__region() {
  auto module = THPObjectPtr(PyModule_Create(&kModule));
  if (!module || !add_gradient_ledger(module.get()) || !add_step_tensors(module.get())) return nullptr;
  return module.release();
}
