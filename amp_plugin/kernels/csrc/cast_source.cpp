#include "cast_source.h"

#include <cstring>

#include "weights_epoch.h"

namespace amp_plugin {
namespace {

// No epoch: what was cast has to be cast again.
constexpr uint64_t kNever = UINT64_MAX;

}  // namespace

const c10::VariableVersion& VersionOf::counter(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter();
}

// A VariableVersion is a pointer that it shows to nobody.
uintptr_t VersionOf::address(const c10::VariableVersion& counter) {
  static_assert(sizeof(c10::VariableVersion) == sizeof(uintptr_t));
  uintptr_t address;
  std::memcpy(&address, &counter, sizeof(address));
  return address;
}

CastSource::CastSource(const at::Tensor& weight)
    : version_(weight),
      cast_version_(version_.now()),
      cast_epoch_(weights_epoch()),
      storage_(weight.storage().getWeakStorageImpl()),
      offset_(weight.storage_offset()),
      sizes_(weight.sizes()),
      strides_(weight.strides()) {}

bool CastSource::is_memory_of(const at::Tensor& weight) const {
  return version_.is_of(weight) && storage_._unsafe_get_target() == weight.storage().unsafeGetStorageImpl() &&
      offset_ == weight.storage_offset() && weight.sizes() == c10::IntArrayRef(sizes_) &&
      weight.strides() == c10::IntArrayRef(strides_);
}

bool CastSource::has_changed() const {
  return cast_version_ != version_.now() || cast_epoch_ != weights_epoch();
}

bool CastSource::shares_storage(const at::Tensor& tensor) const {
  return storage_._unsafe_get_target() == tensor.storage().unsafeGetStorageImpl();
}

void CastSource::mark_changed() { cast_epoch_ = kNever; }

void CastSource::mark_cast(uint32_t version, uint64_t epoch) {
  cast_version_ = version;
  cast_epoch_ = epoch;
}

at::Tensor CastSource::weight() const {
  auto memory = storage_.lock();
  if (!memory) return {};
  const auto key = c10::computeDispatchKey(c10::kFloat, c10::kStrided, memory->device());
  auto weight = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(std::move(memory)), c10::DispatchKeySet(key), caffe2::TypeMeta::Make<float>());
  weight.unsafeGetTensorImpl()->set_sizes_and_strides(sizes_, strides_, offset_);
  return weight;
}

}  // namespace amp_plugin
