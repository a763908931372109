// Which values a cast was made from. Told without a reference to the weight, which
// torch.utils.swap_tensors would refuse to swap.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/DimVector.h>

#include <cstdint>

namespace amp_plugin {

// The version counter is the weight's identity: held here, its address cannot come back for another.
class VersionOf {
 public:
  explicit VersionOf(const at::Tensor& tensor) : counter_(counter(tensor)) {}
  bool is_of(const at::Tensor& tensor) const { return address(counter_) == address(counter(tensor)); }
  bool is_orphan() const { return counter_.unique(); }
  uint32_t now() const { return counter_.current_version(); }

 private:
  static const c10::VariableVersion& counter(const at::Tensor& tensor);
  static uintptr_t address(const c10::VariableVersion& counter);

  c10::VariableVersion counter_;
};

class CastSource {
 public:
  // As it is now, in the current epoch.
  explicit CastSource(const at::Tensor& weight);

  // The weight has the memory that was cast, laid out as it was.
  bool is_memory_of(const at::Tensor& weight) const;
  // Its values may have changed since.
  bool has_changed() const;
  bool is_current(const at::Tensor& weight) const { return is_memory_of(weight) && !has_changed(); }

  bool shares_storage(const at::Tensor& tensor) const;
  bool is_freed() const { return storage_.expired(); }

  void mark_changed();
  void mark_cast(uint32_t version, uint64_t epoch);
  uint32_t version_now() const { return version_.now(); }

  // A tensor on the weight's memory, undefined if that was freed.
  at::Tensor weight() const;

 private:
  using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

  VersionOf version_;
  uint32_t cast_version_;
  uint64_t cast_epoch_;
  WeakStorage storage_;
  int64_t offset_;
  c10::DimVector sizes_;
  c10::DimVector strides_;
};

}  // namespace amp_plugin
