// Reads tensors from Python lists, and the gradients of those tensors, one block at a time.
#pragma once

#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>

namespace amp_plugin::python {

// Checks the type itself. isinstance() would also accept an object that only claims the class, such as a
// mock.
inline bool is_tensor(PyObject* object) {
  return PyType_IsSubtype(Py_TYPE(object), reinterpret_cast<PyTypeObject*>(THPVariableClass)) != 0;
}

// A list of tensors that nobody changes in the meantime. Usually all items have the same type, so that type
// is checked only once.
class Tensors {
 public:
  explicit Tensors(const py::list& list) : list_(list.ptr()) {}

  size_t size() const { return static_cast<size_t>(PyList_GET_SIZE(list_)); }
  PyObject* object(size_t i) const { return PyList_GET_ITEM(list_, static_cast<Py_ssize_t>(i)); }
  const at::Tensor& unchecked(size_t i) const { return THPVariable_Unpack(object(i)); }

  const at::Tensor& operator[](size_t i) {
    if (Py_TYPE(object(i)) != known_) [[unlikely]]
      known_ = tensor_type_of(object(i));
    return unchecked(i);
  }

 private:
  // Not inlined, to keep loops over tensors short.
  [[gnu::noinline]] static PyTypeObject* tensor_type_of(PyObject* object) {
    if (is_tensor(object)) return Py_TYPE(object);
    throw py::type_error(std::string("expected a list of tensors, found a ") + Py_TYPE(object)->tp_name);
  }

  PyObject* list_;
  PyTypeObject* known_ = nullptr;
};

// A gradient is four pointers away from the list, and thousands of parameters do not fit into a near cache.
// So each pointer is followed for a whole block of parameters before the next one. Then the processor can
// load many cache lines at the same time.
constexpr size_t kGradientBlock = 16;  // measured: 8 and 32 take longer

inline void prefetch(const void* object, size_t offset) {
  __builtin_prefetch(static_cast<const char*>(object) + offset);
}

// Calls visit(i, gradient) for each parameter in order, until it returns false. Returns true if it never did.
// A missing gradient is an undefined tensor.
template <typename Visit>
bool visit_gradients(const py::list& list, const Visit& visit) {
  std::array<const c10::TensorImpl*, kGradientBlock> impls;
  std::array<const at::Tensor*, kGradientBlock> grads;
  static const at::Tensor nothing;
  Tensors params(list);
  for (size_t begin = 0; begin < params.size(); begin += kGradientBlock) {
    const size_t left = params.size() - begin, count = std::min(left, kGradientBlock);
    for (size_t i = kGradientBlock; i < std::min(left, 2 * kGradientBlock); ++i)
      __builtin_prefetch(&params.unchecked(begin + i));
    for (size_t i = 0; i < count; ++i) {
      impls[i] = params[begin + i].unsafeGetTensorImpl();
      prefetch(impls[i], 24);  // the pointer to its autograd data
    }
    for (size_t i = 0; i < count; ++i) {
      // Reads the field directly: Tensor::grad() makes a virtual call, which loads another cache line.
      const auto* known = static_cast<const torch::autograd::AutogradMeta*>(impls[i]->autograd_meta());
      grads[i] = known == nullptr ? &nothing : &known->grad_;
      __builtin_prefetch(grads[i]);
    }
    for (size_t i = 0; i < count; ++i) {
      const c10::TensorImpl* gradient = grads[i]->unsafeGetTensorImpl();
      prefetch(gradient, 16);  // storage
      prefetch(gradient, sizeof(c10::TensorImpl) - 32);  // sizes, dtype, device
      prefetch(gradient, sizeof(c10::TensorImpl) - 1);
    }
    for (size_t i = 0; i < count; ++i) {
      if (!visit(begin + i, *grads[i])) return false;
    }
  }
  return true;
}

}  // namespace amp_plugin::python
