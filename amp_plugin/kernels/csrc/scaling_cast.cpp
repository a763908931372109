// cast on the CPU: many tensors into buffers of another dtype, one pass over all of them.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <vector>

#include "cpu_ops.h"

namespace amp_plugin {
namespace {

constexpr int64_t kCastChunk = 32768;  // elements

using Copy = void (*)(const void* src, void* out, int64_t count);

struct CastPiece {
  const char* src;
  char* out;
  int64_t count;
  Copy copy;
};

template <typename From, typename To>
void copy(const void* src, void* out, int64_t count) {
  at::vec::convert(static_cast<const From*>(src), static_cast<To*>(out), count);
}

// The casts of mixed precision; anything else goes through Tensor::copy_.
Copy copy_for(at::ScalarType from, at::ScalarType to) {
  if (from == at::kFloat && to == at::kHalf) return copy<float, at::Half>;
  if (from == at::kFloat && to == at::kBFloat16) return copy<float, at::BFloat16>;
  if (from == at::kHalf && to == at::kFloat) return copy<at::Half, float>;
  if (from == at::kBFloat16 && to == at::kFloat) return copy<at::BFloat16, float>;
  return nullptr;
}

bool casts_in_order(const at::Tensor& one, const at::Tensor& other) {
  return one.layout() == at::kStrided && other.layout() == at::kStrided && one.sizes() == other.sizes() &&
      one.strides() == other.strides() && one.is_non_overlapping_and_dense();
}

}  // namespace

void cast(at::TensorList src, at::TensorList out) {
  TORCH_CHECK_VALUE(
      src.size() == out.size(), "cast: ", src.size(), " tensors to copy and ", out.size(),
      " to write; give one output for each input.");
  std::vector<CastPiece> pieces;
  pieces.reserve(src.size());
  for (size_t i = 0; i < src.size(); ++i) {
    const Copy run = copy_for(src[i].scalar_type(), out[i].scalar_type());
    if (run == nullptr || !casts_in_order(src[i], out[i])) {
      out[i].copy_(src[i]);
      continue;
    }
    const auto from_size = static_cast<int64_t>(src[i].element_size());
    const auto to_size = static_cast<int64_t>(out[i].element_size());
    const auto* from = static_cast<const char*>(src[i].const_data_ptr());
    auto* to = static_cast<char*>(out[i].mutable_data_ptr());
    const int64_t numel = src[i].numel();
    for (int64_t begin = 0; begin < numel; begin += kCastChunk) {
      pieces.push_back(
          {from + begin * from_size, to + begin * to_size, std::min(kCastChunk, numel - begin), run});
    }
    if (!out[i].is_inference()) {
      out[i].unsafeGetTensorImpl()->bump_version();
    }
  }
  int64_t total = 0;
  for (const CastPiece& piece : pieces) {
    total += piece.count;
  }
  const auto count = static_cast<int64_t>(pieces.size());
  const int64_t grain = std::max<int64_t>(1, count * 2 * kCastChunk / std::max<int64_t>(1, total));
  at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      pieces[i].copy(pieces[i].src, pieces[i].out, pieces[i].count);
    }
  });
}

}  // namespace amp_plugin
