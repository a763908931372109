#include "torch_python.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace amp_plugin::python {
namespace {

PyTypeObject* dtype_class = nullptr;

// Both layouts begin with Python's header. What follows is looked for, since it differs between torch's
// releases, and compared with what Python says of the same object.
constexpr Py_ssize_t kHeader = sizeof(PyObject);
constexpr Py_ssize_t kLast = kHeader + 4 * sizeof(void*);

template <typename T>
T word_at(const PyObject* object, Py_ssize_t offset) {
  T word;
  std::memcpy(&word, reinterpret_cast<const char*>(object) + offset, sizeof(T));
  return word;
}

bool learn_tensors(PyObject* torch) {
  const Owned tensor = owned(PyObject_CallMethod(torch, "empty", "i", 0));
  const Owned address = owned(PyObject_GetAttrString(tensor.get(), "_cdata"));
  const void* wanted = PyLong_AsVoidPtr(address.get());
  if (PyErr_Occurred() != nullptr) throw PythonError();
  static_assert(sizeof(at::Tensor) == sizeof(void*));
  for (Py_ssize_t offset = kHeader; offset < kLast; offset += sizeof(void*)) {
    if (word_at<const void*>(tensor.get(), offset) != wanted) continue;
    tensor_offset = offset;
    return true;
  }
  return false;
}

bool learn_dtypes(PyObject* torch) {
  const Owned half = owned(PyObject_GetAttrString(torch, "float16"));
  const Owned wide = owned(PyObject_GetAttrString(torch, "float64"));
  dtype_class = Py_TYPE(half.get());
  return dtype_of(half.get()) == at::kHalf && dtype_of(wide.get()) == at::kDouble;
}

}  // namespace

bool learn_layout() {
  try {
    const Owned torch = owned(PyImport_ImportModule("torch"));
    if (learn_tensors(torch.get()) && learn_dtypes(torch.get())) return true;
    PyErr_SetString(
        PyExc_ImportError, "this torch keeps tensors or dtypes in Python objects of an unknown layout");
  } catch (const PythonError&) {
  }
  return false;
}

void throw_as_cpp(const char* what) {
  // Who presses Ctrl-C between torch's code and ours still gets a KeyboardInterrupt, a moment later.
  if (PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) PyErr_SetInterrupt();
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  std::string text = what;
  if (PyObject* shown = PyObject_Str(value == nullptr ? type : value); shown != nullptr) {
    if (const char* utf8 = PyUnicode_AsUTF8(shown); utf8 != nullptr) text += std::string(": ") + utf8;
    Py_DECREF(shown);
  }
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(traceback);
  PyErr_Clear();
  throw std::runtime_error(text);
}

bool is_dtype(PyObject* object) { return Py_TYPE(object) == dtype_class; }

at::ScalarType dtype_of(PyObject* dtype) { return word_at<at::ScalarType>(dtype, kHeader); }

}  // namespace amp_plugin::python
