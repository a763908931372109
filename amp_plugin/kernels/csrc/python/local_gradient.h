// DTensor gradients: this rank's local tensor and the sharding, read from the Python objects.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "tensors.h"

namespace amp_plugin {

// The sharding of a DTensor. All fields are empty for any other tensor.
struct Sharding {
  py::object spec;
  py::object mesh;
  py::object placements;
};

// Gradients that are on the same device and sharded alike.
struct ShardGroup {
  Sharding sharding;
  c10::Device device;
  std::vector<int64_t> positions;
};

inline bool is_python(const at::Tensor& tensor) { return tensor.key_set().has(c10::DispatchKey::Python); }

// The DTensor class, or null if it was never imported; then there are no DTensors.
inline PyObject* dtensor_class() {
  static PyObject* found = nullptr;
  if (found == nullptr) {
    PyObject* module = PyDict_GetItemString(PyImport_GetModuleDict(), "torch.distributed.tensor");
    if (module != nullptr) found = py::object(py::handle(module).attr("DTensor")).release().ptr();
  }
  return found;
}

// Returns the local tensor of a DTensor, or the tensor itself if it is not one. The DTensor keeps the local
// tensor alive.
inline const at::Tensor& local_part(const at::Tensor& grad) {
  if (!is_python(grad)) return grad;
  return THPVariable_Unpack(py::object(py::cast(grad).attr("_local_tensor")).ptr());
}

// Returns nothing if the gradient is not a DTensor.
inline std::optional<Sharding> sharding_of(const at::Tensor& grad) {
  if (!is_python(grad)) return std::nullopt;
  const py::object wrapper = py::cast(grad);
  if (reinterpret_cast<PyObject*>(Py_TYPE(wrapper.ptr())) != dtensor_class()) return std::nullopt;
  py::object spec = wrapper.attr("_spec");
  py::object mesh = spec.attr("mesh"), placements = spec.attr("placements");
  return Sharding{std::move(spec), std::move(mesh), std::move(placements)};
}

// Returns the group that the gradient belongs to. Adds a new group if there is none.
inline ShardGroup& group_of(std::vector<ShardGroup>& groups, Sharding sharding, c10::Device device) {
  for (ShardGroup& group : groups) {
    // Meshes are compared by identity. Equal but distinct meshes get separate groups.
    if (group.device == device && group.sharding.mesh.is(sharding.mesh) &&
        (group.sharding.placements.is(sharding.placements) ||
         group.sharding.placements.equal(sharding.placements)))
      return group;
  }
  groups.push_back({.sharding = std::move(sharding), .device = device, .positions = {}});
  return groups.back();
}

}  // namespace amp_plugin
