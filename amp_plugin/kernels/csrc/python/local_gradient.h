// DTensor gradients: this rank's part, and how the whole is sharded, read from the Python objects they are.
#pragma once

#include <optional>
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

// This rank's part of a DTensor, which keeps it; any other tensor itself.
const at::Tensor& local_part(const at::Tensor& grad);

// None if it is no DTensor.
std::optional<Sharding> sharding_of(const at::Tensor& grad);

// The group that the gradient belongs to, a new one if there is none yet.
ShardGroup& group_of(std::vector<ShardGroup>& groups, Sharding sharding, c10::Device device);

}  // namespace amp_plugin
