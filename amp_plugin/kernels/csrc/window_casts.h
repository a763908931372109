// Casts of weights that outlive a region: one buffer per weight and dtype for a whole accumulation window.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "cast_source.h"
#include "stream_order.h"

namespace amp_plugin {

class WindowCasts {
 public:
  WindowCasts();
  ~WindowCasts();
  WindowCasts(const WindowCasts&) = delete;
  WindowCasts& operator=(const WindowCasts&) = delete;

  // The memory of `tensor` was written: what was cast from it is stale, whoever keeps it.
  static void forget_storage_everywhere(const at::Tensor& tensor);

  // The weight in `dtype`, on a kept buffer, with an autograd node of its own: the gradients of several
  // micro-batches then meet in the fp32 weight, not in one half precision node. Sets `was_kept` if the
  // buffer needed no cast.
  at::Tensor cast(const at::Tensor& weight, c10::ScalarType dtype, bool& was_kept);

  // A region opens. Where steps are replayed from a captured graph, nothing tells that weights changed:
  // then all casts are stale, unless somebody announces the ends of windows.
  void begin_region() const;

  // Weights change now, whether or not anything else tells; the caller will say so at every window's end.
  void end_window();

  void clear();
  int64_t bytes() const;
  int64_t buffers() const;
  int64_t casts() const { return casts_; }
  int64_t refreshes() const { return refreshes_; }

 private:
  struct Kept {
    c10::ScalarType dtype;
    const c10::TensorImpl* weight;
    CastSource source;
    bool is_used;  // since it was last refreshed
    at::Tensor buffer;
    StreamOrder order;  // of the streams that write and read the buffer
  };
  using Key = std::pair<const c10::TensorImpl*, c10::ScalarType>;
  struct Hash {
    size_t operator()(const Key& key) const {
      return std::hash<const void*>()(key.first) ^ static_cast<size_t>(key.second);
    }
  };

  void forget_storage(const at::Tensor& tensor);
  Kept& add(const at::Tensor& weight, c10::ScalarType dtype);
  std::vector<Kept*> stale(c10::Device device);
  void refresh(const std::vector<Kept*>& stale);
  void drop_freed();

  mutable std::mutex mutex_;
  std::unordered_map<Key, Kept, Hash> kept_;
  size_t drop_at_ = 1;  // entries at which freed weights are looked for next
  std::atomic<bool> ends_are_announced_ = false;
  int64_t casts_ = 0;
  int64_t refreshes_ = 0;
};

}  // namespace amp_plugin
