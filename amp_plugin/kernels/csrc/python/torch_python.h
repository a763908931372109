// What the extension needs of torch's Python bindings. Torch's own headers for it, with pybind11, are two
// thirds of the work of compiling the extension; these few declarations are not.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <ATen/core/Tensor.h>
#include <Python.h>

#include <exception>
#include <memory>

// Torch's own functions, as its headers declare them.
extern PyObject* THPVariableClass;
PyObject* THPVariable_Wrap(const at::TensorBase& tensor);
PyObject* THPDevice_New(const c10::Device& device);
namespace torch {
void translate_exception_to_python(const std::exception_ptr& error);
}

namespace amp_plugin::python {

// Thrown where a Python error is set.
struct PythonError {};

struct Release {
  void operator()(PyObject* object) const { Py_DECREF(object); }
};
using Owned = std::unique_ptr<PyObject, Release>;

// Takes over a new reference; null is a Python error.
inline Owned owned(PyObject* object) {
  if (object == nullptr) throw PythonError();
  return Owned(object);
}

// While it lives, other threads may run Python.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state_); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

class WithGil {
 public:
  WithGil() : state_(PyGILState_Ensure()) {}
  ~WithGil() { PyGILState_Release(state_); }
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

 private:
  PyGILState_STATE state_;
};

// Throws the Python error that is set as one that torch can carry to its caller.
[[noreturn]] void throw_as_cpp(const char* what);

// Runs a function that Python called: a C++ exception becomes torch's Python error for it.
template <typename Function>
PyObject* guarded(const Function& function) {
  try {
    return function();
  } catch (const PythonError&) {
    return nullptr;
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

// Finds out where Python's tensors and dtypes hold torch's; false with an ImportError set if they do not.
bool learn_layout();

inline Py_ssize_t tensor_offset = 0;  // set by learn_layout

// The tensor inside a Python tensor; nothing is checked.
inline const at::Tensor& tensor_of(PyObject* object) {
  return *reinterpret_cast<const at::Tensor*>(reinterpret_cast<const char*>(object) + tensor_offset);
}

// By the type alone: isinstance() believes what an object says of its class, a mock's too.
inline bool is_tensor(PyObject* object) {
  return PyType_IsSubtype(Py_TYPE(object), reinterpret_cast<PyTypeObject*>(THPVariableClass)) != 0;
}

bool is_dtype(PyObject* object);
at::ScalarType dtype_of(PyObject* dtype);

}  // namespace amp_plugin::python
