#include "known_gradients.h"

#include <atomic>

namespace amp_plugin {
namespace {

constinit std::atomic<FindKnownGradients> finder{nullptr};  // set by others while the library is loaded

}  // namespace

std::unique_ptr<KnownGradients> known_gradients(
    size_t count, const at::Tensor& first, const at::Tensor& scale) {
  const FindKnownGradients find = finder.load(std::memory_order_acquire);
  return find == nullptr ? nullptr : find(count, first, scale);
}

void find_known_gradients_with(FindKnownGradients find) { finder.store(find, std::memory_order_release); }

}  // namespace amp_plugin
