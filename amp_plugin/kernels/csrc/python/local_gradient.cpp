#include "local_gradient.h"

#include <tuple>
#include <utility>

#include "binding.h"

namespace amp_plugin {
namespace {

using python::Owned;
using python::owned;

// Looked up by names that Python has hashed already.
struct Names {
  PyObject* const local = PyUnicode_InternFromString("_local_tensor");
  PyObject* const spec = PyUnicode_InternFromString("_spec");
  PyObject* const mesh = PyUnicode_InternFromString("mesh");
  PyObject* const placements = PyUnicode_InternFromString("placements");
};

const Names& names() {
  static const Names interned;
  return interned;
}

Owned attribute(PyObject* object, PyObject* name) { return owned(PyObject_GetAttr(object, name)); }

bool is_python(const at::Tensor& tensor) { return tensor.key_set().has(c10::DispatchKey::Python); }

// The class; null as long as nobody has imported it, when there are no such tensors.
PyObject* dtensor_class() {
  static PyObject* found = nullptr;
  if (found == nullptr) {
    const Owned name = owned(PyUnicode_FromString("torch.distributed.tensor"));
    const Owned module(PyImport_GetModule(name.get()));
    if (module != nullptr) found = owned(PyObject_GetAttrString(module.get(), "DTensor")).release();
    if (PyErr_Occurred() != nullptr) throw python::PythonError();
  }
  return found;
}

bool is_alike(const Sharding& a, const Sharding& b) {
  if (a.mesh != b.mesh) return false;  // another object may be an equal mesh: a group of its own then
  if (a.placements == b.placements) return true;
  const int equal = PyObject_RichCompareBool(a.placements.get(), b.placements.get(), Py_EQ);
  if (equal < 0) throw python::PythonError();
  return equal == 1;
}

}  // namespace

const at::Tensor& local_part(const at::Tensor& grad) {
  if (!is_python(grad)) return grad;
  const Owned wrapper = owned(THPVariable_Wrap(grad));
  return python::tensor_of(attribute(wrapper.get(), names().local).get());
}

std::optional<Sharding> sharding_of(const at::Tensor& grad) {
  if (!is_python(grad)) return std::nullopt;
  const Owned wrapper = owned(THPVariable_Wrap(grad));
  if (reinterpret_cast<PyObject*>(Py_TYPE(wrapper.get())) != dtensor_class()) return std::nullopt;
  Owned spec = attribute(wrapper.get(), names().spec);
  Owned mesh = attribute(spec.get(), names().mesh);
  Owned placements = attribute(spec.get(), names().placements);
  return Sharding{std::move(spec), std::move(mesh), std::move(placements)};
}

ShardGroup& group_of(std::vector<ShardGroup>& groups, Sharding sharding, c10::Device device) {
  for (ShardGroup& group : groups) {
    if (group.device == device && is_alike(group.sharding, sharding)) return group;
  }
  groups.push_back({.sharding = std::move(sharding), .device = device, .positions = {}});
  return groups.back();
}

namespace python {

Owned to_python(const std::vector<ShardGroup>& groups) {
  Owned list = owned(PyList_New(0));
  for (const ShardGroup& group : groups) {
    PyObject* spec = group.sharding.spec.get();
    const Owned item = to_python(
        std::tuple<Owned, Owned, std::vector<int64_t>>(
            spec == nullptr ? none() : Owned(Py_NewRef(spec)), owned(THPDevice_New(group.device)),
            group.positions));
    if (PyList_Append(list.get(), item.get()) < 0) throw PythonError();
  }
  return list;
}

}  // namespace python
}  // namespace amp_plugin
