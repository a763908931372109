// Classes and functions of C++ for Python: arguments and results are converted by their types.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "torch_python.h"

namespace amp_plugin::python {

[[noreturn]] inline void raise(PyObject* type, const std::string& text) {
  PyErr_SetString(type, text.c_str());
  throw PythonError();
}

// A Python list, tuple or dict that the caller holds.
struct List {
  PyObject* object;
  size_t size() const { return static_cast<size_t>(PyList_GET_SIZE(object)); }
  PyObject* operator[](size_t i) const { return PyList_GET_ITEM(object, static_cast<Py_ssize_t>(i)); }
};

struct Tuple {
  PyObject* object;
  size_t size() const { return static_cast<size_t>(PyTuple_GET_SIZE(object)); }
  PyObject* operator[](size_t i) const { return PyTuple_GET_ITEM(object, static_cast<Py_ssize_t>(i)); }
};

struct Dict {
  PyObject* object;
  // Null if it has no such key.
  PyObject* get(PyObject* key) const {
    PyObject* value = PyDict_GetItemWithError(object, key);
    if (value == nullptr && PyErr_Occurred() != nullptr) throw PythonError();
    return value;
  }
};

// The object's type, which is one of tensors. Not inlined, so that loops over tensors stay short.
[[gnu::noinline]] inline PyTypeObject* tensor_type_of(PyObject* object) {
  if (is_tensor(object)) return Py_TYPE(object);
  raise(PyExc_TypeError, std::string("expected a list of tensors, got one with ") + Py_TYPE(object)->tp_name);
}

// Refuses what is no tensor; a list's items mostly are of one type, which is then looked at once.
class ExpectTensors {
 public:
  void expect(PyObject* object) {
    if (Py_TYPE(object) != known_) [[unlikely]]
      known_ = tensor_type_of(object);
  }

 private:
  PyTypeObject* known_ = nullptr;
};

template <typename T>
constexpr bool kIsOptional = false;
template <typename T>
constexpr bool kIsOptional<std::optional<T>> = true;

// `object` is null where the last arguments, optional ones, were not given.
template <typename T>
T from_python(PyObject* object) {
  const auto expect = [object](bool is_right, const char* wanted) {
    if (!is_right) {
      raise(PyExc_TypeError, std::string("expected ") + wanted + ", got " + Py_TYPE(object)->tp_name);
    }
  };
  if constexpr (std::is_same_v<T, List>) {
    expect(PyList_Check(object), "a list");
    return {object};
  } else if constexpr (std::is_same_v<T, Tuple>) {
    expect(PyTuple_Check(object), "a tuple");
    return {object};
  } else if constexpr (std::is_same_v<T, Dict>) {
    expect(PyDict_Check(object), "a dict");
    return {object};
  } else if constexpr (std::is_same_v<T, bool>) {
    const int truth = PyObject_IsTrue(object);  // options of an optimizer are given as 0 and None, too
    if (truth < 0) throw PythonError();
    return truth == 1;
  } else if constexpr (std::is_same_v<T, double>) {
    const double value = PyFloat_AsDouble(object);
    if (value == -1.0 && PyErr_Occurred() != nullptr) throw PythonError();
    return value;
  } else if constexpr (std::is_same_v<T, int64_t>) {
    const int64_t value = PyLong_AsLongLong(object);
    if (value == -1 && PyErr_Occurred() != nullptr) throw PythonError();
    return value;
  } else if constexpr (std::is_same_v<T, at::Tensor>) {
    expect(is_tensor(object), "a tensor");
    return tensor_of(object);
  } else if constexpr (kIsOptional<T>) {
    if (object == nullptr || object == Py_None) return std::nullopt;
    return from_python<typename T::value_type>(object);
  } else {
    static_assert(std::is_same_v<T, std::vector<int64_t>>);
    const Owned items = owned(PySequence_Fast(object, "expected a sequence of numbers"));
    std::vector<int64_t> values;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items.get()); ++i) {
      values.push_back(from_python<int64_t>(PySequence_Fast_GET_ITEM(items.get(), i)));
    }
    return values;
  }
}

inline Owned to_python(Owned object) { return object; }
inline Owned to_python(int64_t number) { return owned(PyLong_FromLongLong(number)); }
inline Owned to_python(const at::Tensor& tensor) { return owned(THPVariable_Wrap(tensor)); }
inline Owned none() { return Owned(Py_NewRef(Py_None)); }

inline Owned to_python(const std::vector<int64_t>& numbers) {
  Owned list = owned(PyList_New(static_cast<Py_ssize_t>(numbers.size())));
  for (size_t i = 0; i < numbers.size(); ++i) {
    PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(i), to_python(numbers[i]).release());
  }
  return list;
}

template <typename... T>
Owned to_python(std::tuple<T...> items) {
  return std::apply(
      [](auto&... item) {
        Owned tuple = owned(PyTuple_New(sizeof...(T)));
        Py_ssize_t i = 0;
        (PyTuple_SET_ITEM(tuple.get(), i++, to_python(std::move(item)).release()), ...);
        return tuple;
      },
      items);
}

// What a Python object of a bound class holds.
template <typename T>
struct Instance {
  PyObject_HEAD T value;
};

template <typename T>
T& value_in(PyObject* self) {
  return reinterpret_cast<Instance<T>*>(self)->value;
}

template <typename T>
inline PyTypeObject* class_of = nullptr;  // set by add_class

// A new Python object that holds the value.
template <typename T>
Owned new_object(T value) {
  Owned self = owned(class_of<T>->tp_alloc(class_of<T>, 0));
  new (&value_in<T>(self.get())) T(std::move(value));
  return self;
}

template <typename T>
void free_object(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  value_in<T>(self).~T();
  type->tp_free(self);
  Py_DECREF(type);  // of a heap type each object holds a reference
}

template <typename... Arguments>
void expect_count(Py_ssize_t given) {
  constexpr Py_ssize_t most = sizeof...(Arguments);
  constexpr Py_ssize_t least = most - (Py_ssize_t{kIsOptional<std::decay_t<Arguments>>} + ... + 0);
  if (given >= least && given <= most) return;
  raise(PyExc_TypeError, "expected " + std::to_string(most) + " arguments, got " + std::to_string(given));
}

template <typename T, typename R, typename... Arguments>
Owned call_method(R (T::*method)(Arguments...), T& self, PyObject* const* arguments, Py_ssize_t count) {
  expect_count<Arguments...>(count);
  return [&]<size_t... i>(std::index_sequence<i...>) {
    [[maybe_unused]] const auto at = [&](size_t k) {
      return static_cast<Py_ssize_t>(k) < count ? arguments[k] : nullptr;
    };
    if constexpr (std::is_void_v<R>) {
      (self.*method)(from_python<std::decay_t<Arguments>>(at(i))...);
      return none();
    } else {
      return to_python((self.*method)(from_python<std::decay_t<Arguments>>(at(i))...));
    }
  }(std::index_sequence_for<Arguments...>());
}

template <typename T, typename R, typename... Arguments>
Owned call_method(R (T::*method)(Arguments...) const, T& self, PyObject* const* arguments, Py_ssize_t count) {
  return call_method(reinterpret_cast<R (T::*)(Arguments...)>(method), self, arguments, count);
}

using Fast = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

inline PyMethodDef fast(const char* name, Fast function) {
  const auto any = reinterpret_cast<void (*)()>(function);
  return {name, reinterpret_cast<PyCFunction>(any), METH_FASTCALL, nullptr};
}

// A method for Python: one of T, whose arguments and result have conversions above.
template <typename T, auto function>
PyMethodDef method(const char* name) {
  return fast(name, [](PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
    return guarded([&] { return call_method(function, value_in<T>(self), arguments, count).release(); });
  });
}

// Objects are made from positional arguments of these types.
template <typename T, typename... Arguments>
PyObject* make_object(PyTypeObject* /*type*/, PyObject* arguments, PyObject* named) {
  return guarded([&] {
    if (named != nullptr && PyDict_GET_SIZE(named) != 0) raise(PyExc_TypeError, "arguments have no names");
    expect_count<Arguments...>(PyTuple_GET_SIZE(arguments));
    return [&]<size_t... i>(std::index_sequence<i...>) {
      return new_object(T(from_python<Arguments>(PyTuple_GET_ITEM(arguments, i))...)).release();
    }(std::index_sequence_for<Arguments...>());
  });
}

// Adds a class to a module; false with a Python error set if it cannot. `methods` must outlive the process.
template <typename T, typename... Arguments>
bool add_class(PyObject* module, const char* name, PyMethodDef* methods, lenfunc length = nullptr) {
  PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(&make_object<T, Arguments...>)},
      {Py_tp_dealloc, reinterpret_cast<void*>(&free_object<T>)},
      {Py_tp_methods, methods},
      {length == nullptr ? 0 : Py_mp_length, reinterpret_cast<void*>(length)},
      {0, nullptr},
  };
  PyType_Spec spec = {name, sizeof(Instance<T>), 0, Py_TPFLAGS_DEFAULT, slots};
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr) return false;
  class_of<T> = reinterpret_cast<PyTypeObject*>(type);
  return PyModule_AddType(module, class_of<T>) == 0;
}

}  // namespace amp_plugin::python
