// Cast weights that outlive a region: one buffer per weight and dtype for a whole accumulation window.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace amp_plugin {

class KeptCasts {
 public:
  // The weight in `dtype`, on a kept buffer, with an autograd node of its own: the gradients of several
  // micro-batches then meet in the fp32 weight, not in one half precision node. Sets `was_kept` if the
  // buffer needed no cast.
  at::Tensor cast(const at::Tensor& weight, c10::ScalarType dtype, bool& was_kept);

  // The memory of `tensor` was written: what was cast from it is stale.
  void forget_storage(const at::Tensor& tensor);

  void clear();
  int64_t bytes() const;
  int64_t buffers() const;
  int64_t casts() const { return casts_; }
  int64_t refreshes() const { return refreshes_; }

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
  struct Kept {
    c10::ScalarType dtype;
    WeakTensor weight;
    WeakStorage storage;
    int64_t offset;
    std::vector<int64_t> sizes;
    std::vector<int64_t> strides;
    uint32_t version;
    uint64_t epoch;
    at::Tensor buffer;
  };
  using Key = std::pair<const c10::TensorImpl*, c10::ScalarType>;
  struct Hash {
    size_t operator()(const Key& key) const {
      return std::hash<const void*>()(key.first) ^ static_cast<size_t>(key.second);
    }
  };

  static bool is_same_memory(const Kept& kept, const at::Tensor& weight);
  static bool is_current(const Kept& kept, const at::Tensor& weight);
  Kept& add(const at::Tensor& weight, c10::ScalarType dtype);
  std::vector<Kept*> stale();
  void refresh(const std::vector<Kept*>& stale);
  void drop_dead();

  mutable std::mutex mutex_;
  std::unordered_map<Key, Kept, Hash> kept_;
  size_t drop_at_ = 1;  // entries at which dead weights are looked for next
  int64_t casts_ = 0;
  int64_t refreshes_ = 0;
};

}  // namespace amp_plugin
