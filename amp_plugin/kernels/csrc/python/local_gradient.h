// DTensor gradients: this rank's part, and how the whole is sharded, read from the Python objects they are.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "tensors.h"

namespace amp_plugin {

// What a DTensor says of its layout; all empty for a tensor that is none.
struct Sharding {
  py::object spec;
  py::object mesh;
  py::object placements;
};

// Gradients on one device that are sharded alike.
struct ShardGroup {
  Sharding sharding;
  c10::Device device;
  std::vector<int64_t> positions;
};

inline bool is_python(const at::Tensor& tensor) { return tensor.key_set().has(c10::DispatchKey::Python); }

// The class; null as long as nobody has imported it, when there are no such tensors.
inline PyObject* dtensor_class() {
  static PyObject* found = nullptr;
  if (found == nullptr) {
    PyObject* module = PyDict_GetItemString(PyImport_GetModuleDict(), "torch.distributed.tensor");
    if (module != nullptr) found = py::object(py::handle(module).attr("DTensor")).release().ptr();
  }
  return found;
}

// This rank's part of a DTensor, which keeps it; any other tensor itself.
inline const at::Tensor& local_part(const at::Tensor& grad) {
  if (!is_python(grad)) return grad;
  return THPVariable_Unpack(py::object(py::cast(grad).attr("_local_tensor")).ptr());
}

// None if it is no DTensor.
inline std::optional<Sharding> sharding_of(const at::Tensor& grad) {
  if (!is_python(grad)) return std::nullopt;
  const py::object wrapper = py::cast(grad);
  if (reinterpret_cast<PyObject*>(Py_TYPE(wrapper.ptr())) != dtensor_class()) return std::nullopt;
  py::object spec = wrapper.attr("_spec");
  py::object mesh = spec.attr("mesh"), placements = spec.attr("placements");
  return Sharding{std::move(spec), std::move(mesh), std::move(placements)};
}

// The group that the gradient belongs to, a new one if there is none yet.
inline ShardGroup& group_of(std::vector<ShardGroup>& groups, Sharding sharding, c10::Device device) {
  for (ShardGroup& group : groups) {
    // Another object may be an equal mesh: a group of its own then.
    if (group.device == device && group.sharding.mesh.is(sharding.mesh) &&
        (group.sharding.placements.is(sharding.placements) ||
         group.sharding.placements.equal(sharding.placements)))
      return group;
  }
  groups.push_back({.sharding = std::move(sharding), .device = device, .positions = {}});
  return groups.back();
}

}  // namespace amp_plugin
