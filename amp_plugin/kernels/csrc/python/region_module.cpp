// Python's way in and out of a region; all else is reached through torch.ops.
#include <memory>

#include "../may_keep.h"
#include "../region.h"
#include "../weights_epoch.h"
#include "../window_casts.h"
#include "binding.h"
#include "gradient_ledger.h"
#include "step_tensors.h"

namespace {

using namespace amp_plugin::python;
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
  return guarded([&]() -> PyObject* {
    PyObject* opening = count == 2 ? arguments[1] : nullptr;
    if (opening == nullptr || !PyTuple_Check(opening) || PyTuple_GET_SIZE(opening) < 6 ||
        !is_dtype(PyTuple_GET_ITEM(opening, 1))) {
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
         .dtype = dtype_of(PyTuple_GET_ITEM(opening, 1)),
         .enabled = PyTuple_GET_ITEM(opening, 2) == Py_True,
         .cache_enabled = PyTuple_GET_ITEM(opening, 3) == Py_True,
         .rules = static_cast<int>(PyLong_AsLong(PyTuple_GET_ITEM(opening, 4))),
         .kept = std::move(kept)});
    Py_RETURN_NONE;
  });
}

// exit(owner) -> bool
PyObject* exit(PyObject* /*module*/, PyObject* owner) {
  return guarded([&]() -> PyObject* { return PyBool_FromLong(amp_plugin::exit_region(owner)); });
}

PyObject* invalidate(PyObject* /*module*/, PyObject* /*unused*/) {
  return guarded([&]() -> PyObject* {
    amp_plugin::invalidate_weight_casts();
    Py_RETURN_NONE;
  });
}

PyObject* new_casts(PyObject* /*module*/, PyObject* /*unused*/) {
  return guarded([&]() -> PyObject* {
    return PyCapsule_New(
        new SharedCasts(std::make_shared<amp_plugin::WindowCasts>()), kWindowCasts, destroy_casts);
  });
}

PyObject* clear_casts(PyObject* /*module*/, PyObject* capsule) {
  return guarded([&]() -> PyObject* {
    const SharedCasts* casts = casts_in(capsule);
    if (casts == nullptr) return nullptr;
    {
      const WithoutGil others_may_run;  // whoever casts holds the lock, and may need Python
      (*casts)->clear();
    }
    Py_RETURN_NONE;
  });
}

PyObject* end_window(PyObject* /*module*/, PyObject* capsule) {
  return guarded([&]() -> PyObject* {
    const SharedCasts* casts = casts_in(capsule);
    if (casts == nullptr) return nullptr;
    (*casts)->end_window();
    Py_RETURN_NONE;
  });
}

// count_casts(casts) -> (buffers, bytes, casts, multi-tensor casts)
PyObject* count_casts(PyObject* /*module*/, PyObject* capsule) {
  return guarded([&]() -> PyObject* {
    const SharedCasts* casts = casts_in(capsule);
    if (casts == nullptr) return nullptr;
    long long buffers = 0, bytes = 0;
    {
      const WithoutGil others_may_run;
      buffers = (*casts)->buffers();
      bytes = (*casts)->bytes();
    }
    return Py_BuildValue(
        "LLLL", buffers, bytes, static_cast<long long>((*casts)->casts()),
        static_cast<long long>((*casts)->refreshes()));
  });
}

PyObject* parameter_class = nullptr;
PyObject* managed_test = nullptr;

// Only parameters outlive a region. FSDP2 shows plain leaf parameters whose memory it frees and refills
// with no version counter moving.
amp_plugin::Lifetime ask_lifetime(const at::Tensor& tensor) {
  using amp_plugin::Lifetime;
  const Owned wrapped = to_python(tensor);
  const int is_parameter = PyObject_IsInstance(wrapped.get(), parameter_class);
  if (is_parameter < 0) throw PythonError();
  if (is_parameter == 0) return Lifetime::kRegion;
  if (PyDict_GetItemString(PyImport_GetModuleDict(), "torch.distributed.fsdp") == nullptr) {
    return Lifetime::kWindow;
  }
  const Owned answer = owned(PyObject_CallOneArg(managed_test, wrapped.get()));
  return PyObject_IsTrue(answer.get()) == 1 ? Lifetime::kNone : Lifetime::kWindow;
}

amp_plugin::Lifetime lifetime_of_casts(const at::Tensor& tensor) {
  const WithGil gil;
  try {
    return ask_lifetime(tensor);
  } catch (const PythonError&) {
    throw_as_cpp("amp_plugin cannot tell how long a weight's cast may be kept");
  }
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

PyMethodDef kMethods[] = {
    fast("enter", enter),
    {"exit", exit, METH_O, nullptr},
    {"invalidate", invalidate, METH_NOARGS, nullptr},
    fast("keep_only", keep_only),
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
  if (!learn_layout()) return nullptr;
  PyObject* module = PyModule_Create(&kModule);
  if (module != nullptr && add_gradient_ledger(module) && add_step_tensors(module)) return module;
  Py_XDECREF(module);
  return nullptr;
}
