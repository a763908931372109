#include "kept_casts.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_to_copy_ops.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/empty_strided_ops.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <optional>

#include "cast_log.h"
#include "weight_cache.h"

namespace amp_plugin {
namespace {

// No epoch of the weights: the buffer has to be filled before it is used.
constexpr uint64_t kNever = UINT64_MAX;

// The backward of a cast: the gradient goes to the weight in the weight's dtype.
class CastBackward final : public torch::autograd::Node {
 public:
  explicit CastBackward(c10::ScalarType dtype) : dtype_(dtype) {}
  std::string name() const override { return "AmpPluginCastBackward"; }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    if (!grads[0].defined()) return {at::Tensor()};
    return {at::_ops::_to_copy::call(
        grads[0], dtype_, std::nullopt, std::nullopt, std::nullopt, false, std::nullopt)};
  }

 private:
  const c10::ScalarType dtype_;
};

// torch counts references to nodes inside them since 2.12, before in a shared_ptr.
template <typename Node>
auto make_node(c10::ScalarType dtype) {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, Node>) {
    return c10::make_intrusive<Node>(dtype);
  } else {
    return std::make_shared<Node>(dtype);
  }
}

// A tensor on the buffer's memory that autograd sees as the cast of `weight`.
at::Tensor attached(const at::Tensor& buffer, const at::Tensor& weight) {
  at::Tensor cast = buffer.variable_data();
  auto node = make_node<CastBackward>(weight.scalar_type());
  node->set_next_edges(torch::autograd::collect_next_edges(weight));
  torch::autograd::set_history(cast, node);
  return cast;
}

void cast_all(const std::vector<at::Tensor>& weights, const std::vector<at::Tensor>& buffers) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("amp_plugin::cast", "")
                             .typed<void(at::TensorList, at::TensorList)>();
  const c10::AutoGradMode no_grad(false);
  op.call(weights, buffers);
}

// Somebody else still holds the memory: a graph that saved it for its backward pass.
bool is_in_use(const at::Tensor& buffer) {
  return buffer.use_count() > 1 || buffer.storage().use_count() > 1;
}

}  // namespace

bool KeptCasts::is_same_memory(const Kept& kept, const at::Tensor& weight) {
  return kept.weight._unsafe_get_target() == weight.unsafeGetTensorImpl() &&
      kept.storage._unsafe_get_target() == weight.storage().unsafeGetStorageImpl() &&
      kept.offset == weight.storage_offset() && weight.sizes() == c10::IntArrayRef(kept.sizes) &&
      weight.strides() == c10::IntArrayRef(kept.strides);
}

bool KeptCasts::is_current(const Kept& kept, const at::Tensor& weight) {
  return is_same_memory(kept, weight) && kept.epoch == weights_epoch() &&
      kept.version == weight.unsafeGetTensorImpl()->version_counter().current_version();
}

at::Tensor KeptCasts::cast(const at::Tensor& weight, c10::ScalarType dtype, bool& was_kept) {
  const std::lock_guard lock(mutex_);
  const Key key{weight.unsafeGetTensorImpl(), dtype};
  const auto found = kept_.find(key);
  was_kept = found != kept_.end() && is_current(found->second, weight);
  if (!was_kept) {
    if (found == kept_.end() || !is_same_memory(found->second, weight)) {
      refresh({&add(weight, dtype)});
    } else {
      refresh(stale());
    }
  }
  return attached(kept_.at(key).buffer, weight);
}

KeptCasts::Kept& KeptCasts::add(const at::Tensor& weight, c10::ScalarType dtype) {
  const Key key{weight.unsafeGetTensorImpl(), dtype};
  kept_.erase(key);
  if (kept_.size() >= drop_at_) drop_dead();
  const auto added = kept_.emplace(
      key,
      Kept{
          .dtype = dtype,
          .weight = WeakTensor(weight.getIntrusivePtr()),
          .storage = weight.storage().getWeakStorageImpl(),
          .offset = weight.storage_offset(),
          .sizes = weight.sizes().vec(),
          .strides = weight.strides().vec(),
          .version = 0,
          .epoch = kNever,  // refresh() fills it
          .buffer = {},
      });
  return added.first->second;
}

// Those whose weights have changed, on the device of the first; the casts of dead weights are dropped.
std::vector<KeptCasts::Kept*> KeptCasts::stale() {
  drop_dead();
  std::vector<Kept*> found;
  std::optional<c10::Device> device;
  for (auto& [key, kept] : kept_) {
    const auto impl = kept.weight.lock();
    if (!impl.defined()) continue;
    const at::Tensor weight = at::Tensor(impl);
    if (is_current(kept, weight) || !is_same_memory(kept, weight)) continue;
    if (device.value_or(weight.device()) != weight.device()) continue;
    device = weight.device();
    found.push_back(&kept);
  }
  return found;
}

// One multi-tensor cast; a buffer that a live graph still needs is replaced, not overwritten.
void KeptCasts::refresh(const std::vector<Kept*>& stale) {
  std::vector<at::Tensor> weights;
  std::vector<at::Tensor> buffers;
  const uint64_t epoch = weights_epoch();
  for (Kept* kept : stale) {
    const at::Tensor weight = at::Tensor(kept->weight.lock());
    if (!kept->buffer.defined() || is_in_use(kept->buffer)) {
      const c10::AutoGradMode no_grad(false);
      kept->buffer = at::_ops::empty_strided::call(
          c10::fromIntArrayRefSlow(weight.sizes()), c10::fromIntArrayRefSlow(weight.strides()), kept->dtype,
          std::nullopt, weight.device(), std::nullopt);
    }
    weights.push_back(weight.detach());
    buffers.push_back(kept->buffer);
    if (is_logging_casts()) {
      log_cast({"amp_plugin::cast", ""}, 0, weight, kept->dtype, /*cached=*/false);
    }
  }
  cast_all(weights, buffers);
  for (size_t i = 0; i < stale.size(); ++i) {  // only now: a cast that raises leaves them stale
    stale[i]->epoch = epoch;
    stale[i]->version = weights[i].unsafeGetTensorImpl()->version_counter().current_version();
  }
  casts_ += static_cast<int64_t>(weights.size());
  refreshes_ += 1;
}

void KeptCasts::drop_dead() {
  for (auto each = kept_.begin(); each != kept_.end();) {
    each = each->second.weight.expired() ? kept_.erase(each) : std::next(each);
  }
  drop_at_ = kept_.size() + std::max<size_t>(4, kept_.size() / 2);
}

void KeptCasts::forget_storage(const at::Tensor& tensor) {
  if (!tensor.has_storage()) return;
  const std::lock_guard lock(mutex_);
  const auto* storage = tensor.storage().unsafeGetStorageImpl();
  for (auto& [key, kept] : kept_) {
    if (kept.storage._unsafe_get_target() == storage) kept.epoch = kNever;
  }
}

void KeptCasts::clear() {
  const std::lock_guard lock(mutex_);
  kept_.clear();
}

int64_t KeptCasts::bytes() const {
  const std::lock_guard lock(mutex_);
  int64_t total = 0;
  for (const auto& [key, kept] : kept_) {
    if (kept.buffer.defined()) total += static_cast<int64_t>(kept.buffer.storage().nbytes());
  }
  return total;
}

int64_t KeptCasts::buffers() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int64_t>(kept_.size());
}

}  // namespace amp_plugin
