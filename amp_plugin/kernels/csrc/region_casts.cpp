#include "region_casts.h"

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <unordered_map>

#include "cast_source.h"
#include "stream_order.h"

namespace amp_plugin {
namespace {

struct KeptCast {
  CastSource source;
  at::Tensor cast;
  int64_t stream;  // it was made on; another may be ahead of it

  bool is_of(const at::Tensor& weight, c10::ScalarType dtype) const {
    return cast.scalar_type() == dtype && stream == stream_number(weight.device());
  }
};

// By the weight's address, which does not come back: its cast's autograd graph holds the weight.
using CastsByWeight = std::unordered_map<const c10::TensorImpl*, c10::SmallVector<KeptCast, 1>>;

CastsByWeight& casts_of_thread() {
  thread_local CastsByWeight casts;
  return casts;
}

}  // namespace

at::Tensor find_cast(const at::Tensor& weight, c10::ScalarType dtype) {
  auto& casts = casts_of_thread();
  const auto found = casts.find(weight.unsafeGetTensorImpl());
  if (found == casts.end()) return {};
  for (const auto& kept : found->second) {
    if (kept.is_of(weight, dtype) && kept.source.is_current(weight)) return kept.cast;
  }
  return {};
}

void keep_cast(const at::Tensor& weight, const at::Tensor& cast) {
  auto& entries = casts_of_thread()[weight.unsafeGetTensorImpl()];
  const auto replaced = [&](const KeptCast& kept) {
    return kept.is_of(weight, cast.scalar_type()) || !kept.source.is_current(weight);
  };
  entries.erase(std::remove_if(entries.begin(), entries.end(), replaced), entries.end());
  entries.push_back(
      KeptCast{.source = CastSource(weight), .cast = cast, .stream = stream_number(weight.device())});
}

void clear_region_casts() {
  auto& casts = casts_of_thread();
  if (!casts.empty()) casts.clear();
}

void forget_casts_of_storage(const at::Tensor& tensor) {
  auto& casts = casts_of_thread();
  if (casts.empty() || !tensor.has_storage()) return;
  const auto shares = [&](const KeptCast& kept) { return kept.source.shares_storage(tensor); };
  for (auto weight = casts.begin(); weight != casts.end();) {
    auto& entries = weight->second;
    entries.erase(std::remove_if(entries.begin(), entries.end(), shares), entries.end());
    weight = entries.empty() ? casts.erase(weight) : std::next(weight);
  }
}

int64_t kept_cast_count() {
  int64_t count = 0;
  for (const auto& [weight, entries] : casts_of_thread()) count += static_cast<int64_t>(entries.size());
  return count;
}

}  // namespace amp_plugin
