// pack_weights_, unpack_weights_ and round_weights_ on the CPU: one pass over many tensors.

#include <ATen/core/Tensor.h>

#include <vector>

#include "cpu_ops.h"
#include "cuda_layout.h"
#include "pieces.h"
#include "stored_weights.h"

namespace amp_plugin {
namespace {

std::vector<int64_t> numels_of(at::TensorList tensors) {
  std::vector<int64_t> numels;
  for (const at::Tensor& tensor : tensors) numels.push_back(tensor.numel());
  return numels;
}

uint16_t round_weight(uint32_t bits, uint32_t draw) {
  const uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) return static_cast<uint16_t>((bits >> 16 & 0x8000U) | 0x7FC0U);
  return static_cast<uint16_t>((bits + draw) >> 16);
}

}  // namespace

void pack_weights_(at::TensorList masters, at::TensorList high, at::TensorList low) {
  const StoredWeights weights("pack_weights_", masters, high, low);
  for_each_piece(numels_of(masters), [&](size_t tensor, int64_t begin, int64_t end) {
    const auto* bits = static_cast<const uint32_t*>(weights.masters.tensors()[tensor].const_data_ptr());
    auto* upper = static_cast<uint16_t*>(weights.high.tensors()[tensor].mutable_data_ptr());
    auto* lower = static_cast<uint16_t*>(weights.low.tensors()[tensor].mutable_data_ptr());
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t halves = cuda::pack_weight(bits[i]);
      upper[i] = static_cast<uint16_t>(halves >> 16);
      lower[i] = static_cast<uint16_t>(halves);
    }
  });
  weights.high.finish();
  weights.low.finish();
}

void unpack_weights_(at::TensorList high, at::TensorList low, at::TensorList masters) {
  const StoredWeights weights("unpack_weights_", masters, high, low);
  for_each_piece(numels_of(masters), [&](size_t tensor, int64_t begin, int64_t end) {
    const auto* upper = static_cast<const uint16_t*>(weights.high.tensors()[tensor].const_data_ptr());
    const auto* lower = static_cast<const uint16_t*>(weights.low.tensors()[tensor].const_data_ptr());
    auto* bits = static_cast<uint32_t*>(weights.masters.tensors()[tensor].mutable_data_ptr());
    for (int64_t i = begin; i < end; ++i) bits[i] = cuda::unpack_weight(upper[i], lower[i]);
  });
  weights.masters.finish();
}

void round_weights_(at::TensorList masters, at::TensorList out, int64_t seed, int64_t step) {
  check_count("round_weights_", masters.size(), out.size(), "outputs");
  for (size_t i = 0; i < masters.size(); ++i) {
    check_weight(masters[i], masters[i], at::kFloat, "round_weights_", "a master");
    check_weight(out[i], masters[i], at::kBFloat16, "round_weights_", "an output");
  }
  std::vector<at::Tensor> from;
  for (const at::Tensor& master : masters) from.push_back(master.contiguous());
  const Dense to(out, from);
  const uint32_t key = cuda::seed_of(step) + static_cast<uint32_t>(seed) * 0xC2B2AE3DU;
  for_each_piece(numels_of(masters), [&](size_t tensor, int64_t begin, int64_t end) {
    const auto* bits = static_cast<const uint32_t*>(from[tensor].const_data_ptr());
    auto* rounded = static_cast<uint16_t*>(to.tensors()[tensor].mutable_data_ptr());
    const uint32_t salted = key + static_cast<uint32_t>(tensor) * 0x27D4EB2FU;
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t draw = cuda::random_bits(static_cast<uint32_t>(i), salted) & 0xFFFFU;
      rounded[i] = round_weight(bits[i], draw);
    }
  });
  to.finish();
}

}  // namespace amp_plugin
