#include "window_casts.h"

#include <ATen/ops/empty_strided_ops.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <unordered_set>

#include "autograd_node.h"
#include "cast_log.h"
#include "op_calls.h"
#include "weights_epoch.h"

namespace amp_plugin {
namespace {

std::mutex all_mutex;

// Those that exist; never freed, since some live until the process ends.
std::unordered_set<WindowCasts*>& all_casts() {
  static auto* const casts = new std::unordered_set<WindowCasts*>();
  return *casts;
}

}  // namespace
namespace {

void cast_all(const std::vector<at::Tensor>& weights, const std::vector<at::Tensor>& buffers) {
  const c10::AutoGradMode no_grad(false);
  op_calls::cast(weights, buffers);
}

// Somebody else still holds the memory: a graph that saved it for its backward pass.
bool is_in_use(const at::Tensor& buffer) {
  return buffer.use_count() > 1 || buffer.storage().use_count() > 1;
}

at::Tensor new_buffer(const at::Tensor& weight, c10::ScalarType dtype) {
  const c10::AutoGradMode no_grad(false);
  return at::_ops::empty_strided::call(
      c10::fromIntArrayRefSlow(weight.sizes()), c10::fromIntArrayRefSlow(weight.strides()), dtype,
      std::nullopt, weight.device(), std::nullopt);
}

}  // namespace

at::Tensor WindowCasts::cast(const at::Tensor& weight, c10::ScalarType dtype, bool& was_kept) {
  const std::lock_guard lock(mutex_);
  const auto found = kept_.find({weight.unsafeGetTensorImpl(), dtype});
  const bool is_new = found == kept_.end() || !found->second.source.is_memory_of(weight);
  Kept& kept = is_new ? add(weight, dtype) : found->second;
  was_kept = !is_new && !kept.source.has_changed();
  kept.is_used = true;
  if (is_new || !kept.buffer.defined()) {
    refresh({&kept});
  } else if (!was_kept) {
    refresh(stale(weight.device()));
  }
  kept.is_used = true;
  kept.order.before_read(kept.buffer);
  return attached_cast(kept.buffer, weight);
}

WindowCasts::Kept& WindowCasts::add(const at::Tensor& weight, c10::ScalarType dtype) {
  const Key key{weight.unsafeGetTensorImpl(), dtype};
  kept_.erase(key);
  if (kept_.size() >= drop_at_) drop_freed();
  Kept added{
      .dtype = dtype,
      .weight = key.first,
      .source = CastSource(weight),
      .is_used = false,
      .buffer = {},
      .order = {}};
  added.source.mark_changed();  // refresh() fills it
  return kept_.emplace(key, std::move(added)).first->second;
}

// Those in use whose weights have changed, on one device.
std::vector<WindowCasts::Kept*> WindowCasts::stale(c10::Device device) {
  drop_freed();
  std::vector<Kept*> found;
  for (auto& [key, kept] : kept_) {
    const bool is_wanted = kept.is_used && kept.buffer.defined() && kept.buffer.device() == device;
    if (is_wanted && kept.source.has_changed()) found.push_back(&kept);
  }
  return found;
}

// One multi-tensor cast; a buffer that a live graph still needs is replaced, not overwritten.
void WindowCasts::refresh(const std::vector<Kept*>& stale) {
  std::vector<Kept*> refreshed;
  std::vector<at::Tensor> weights;
  std::vector<at::Tensor> buffers;
  std::vector<uint32_t> versions;
  const uint64_t epoch = weights_epoch();
  for (Kept* kept : stale) {
    const at::Tensor weight = kept->source.weight();
    if (!weight.defined()) continue;  // freed by another thread
    if (!kept->buffer.defined() || is_in_use(kept->buffer)) {
      kept->buffer = new_buffer(weight, kept->dtype);
      kept->order = {};
    }
    kept->order.before_write(kept->buffer);
    refreshed.push_back(kept);
    weights.push_back(weight);
    buffers.push_back(kept->buffer);
    versions.push_back(kept->source.version_now());
    if (is_logging_casts()) log_refresh(weight, kept->dtype, kept->weight);
  }
  cast_all(weights, buffers);
  const auto written = refreshed.empty() ? nullptr : StreamOrder::now(refreshed.front()->buffer.device());
  for (size_t i = 0; i < refreshed.size(); ++i) {  // only now: a cast that raises leaves them stale
    refreshed[i]->source.mark_cast(versions[i], epoch);
    refreshed[i]->is_used = false;
    refreshed[i]->order.note_write(refreshed[i]->buffer, written);
  }
  casts_ += static_cast<int64_t>(weights.size());
  refreshes_ += 1;
}

void WindowCasts::drop_freed() {
  std::erase_if(kept_, [](const auto& entry) { return entry.second.source.is_freed(); });
  drop_at_ = kept_.size() + std::max<size_t>(4, kept_.size() / 2);
}

WindowCasts::WindowCasts() {
  const std::lock_guard lock(all_mutex);
  all_casts().insert(this);
}

WindowCasts::~WindowCasts() {
  const std::lock_guard lock(all_mutex);
  all_casts().erase(this);
}

void WindowCasts::forget_storage_everywhere(const at::Tensor& tensor) {
  const std::lock_guard lock(all_mutex);
  for (WindowCasts* casts : all_casts()) casts->forget_storage(tensor);
}

void WindowCasts::forget_storage(const at::Tensor& tensor) {
  if (!tensor.has_storage()) return;
  const std::lock_guard lock(mutex_);
  for (auto& [key, kept] : kept_) {
    if (kept.source.shares_storage(tensor)) kept.source.mark_changed();
  }
}

void WindowCasts::begin_region() const {
  if (steps_are_captured() && !ends_are_announced_) invalidate_weight_casts();
}

void WindowCasts::end_window() {
  ends_are_announced_ = true;
  invalidate_weight_casts();
}

void WindowCasts::clear() {
  const std::lock_guard lock(mutex_);
  kept_.clear();
}

int64_t WindowCasts::bytes() const {
  const std::lock_guard lock(mutex_);
  int64_t total = 0;
  for (const auto& [key, kept] : kept_) {
    if (kept.buffer.defined()) total += static_cast<int64_t>(kept.buffer.storage().nbytes());
  }
  return total;
}

int64_t WindowCasts::buffers() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int64_t>(kept_.size());
}

}  // namespace amp_plugin
