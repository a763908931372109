// pack_weights_, unpack_weights_ and round_weights_ on the CPU: one pass over many tensors.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/FunctionRef.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "cpu_ops.h"
#include "cuda_layout.h"
#include "tensor_memory.h"

namespace amp_plugin {
namespace {

constexpr int64_t kPiece = 32768;  // elements per piece

// Elements [begin, end) of the tensor with this number.
struct Piece {
  size_t tensor;
  int64_t begin;
  int64_t end;
};

void check(
    const at::Tensor& tensor, const at::Tensor& like, at::ScalarType dtype, const char* op,
    const char* name) {
  TORCH_CHECK_VALUE(
      tensor.scalar_type() == dtype && tensor.sizes() == like.sizes(), op, ": ", name, " must be ", dtype,
      " of the shape of its weight, ", like.sizes(), "; got ", tensor.scalar_type(), " of shape ",
      tensor.sizes(), ".");
}

void check_count(const char* op, size_t masters, size_t other, const char* name) {
  TORCH_CHECK_VALUE(
      masters == other, op, ": ", masters, " masters and ", other, " ", name, "; give one for each master.");
}

// Tensors to write, in the memory order of the tensors `like`. A tensor in another order is written through a
// buffer, which finish() copies back.
class Written {
 public:
  Written(at::TensorList tensors, const std::vector<at::Tensor>& like) : tensors_(tensors) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      const bool in_place = same_memory_order(tensors[i], like[i]);
      buffers_.push_back(in_place ? tensors[i] : at::empty_like(like[i], tensors[i].scalar_type()));
    }
  }

  template <typename T>
  T* data(size_t i) const {
    return static_cast<T*>(buffers_[i].mutable_data_ptr());
  }

  void finish() const {
    for (size_t i = 0; i < buffers_.size(); ++i) {
      if (!buffers_[i].is_same(tensors_[i])) tensors_[i].copy_(buffers_[i]);
    }
    increment_versions(tensors_);
  }

 private:
  at::TensorList tensors_;
  std::vector<at::Tensor> buffers_;
};

std::vector<at::Tensor> dense(at::TensorList tensors) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& tensor : tensors) {
    result.push_back(tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous());
  }
  return result;
}

// Calls `run` for pieces that together cover all elements, on all threads. It is not a template, so it is
// compiled once.
void for_each_piece(const std::vector<at::Tensor>& tensors, c10::function_ref<void(const Piece&)> run) {
  std::vector<Piece> pieces;
  int64_t total = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t numel = tensors[i].numel();
    for (int64_t begin = 0; begin < numel; begin += kPiece) {
      pieces.push_back({i, begin, std::min(numel, begin + kPiece)});
    }
    total += numel;
  }
  const auto count = static_cast<int64_t>(pieces.size());
  const int64_t grain = std::max<int64_t>(1, count * 2 * kPiece / std::max<int64_t>(1, total));
  at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      run(pieces[i]);
    }
  });
}

}  // namespace

void pack_weights_(at::TensorList masters, at::TensorList high, at::TensorList low) {
  check_count("pack_weights_", masters.size(), high.size(), "high halves");
  check_count("pack_weights_", masters.size(), low.size(), "low halves");
  for (size_t i = 0; i < masters.size(); ++i) {
    check(masters[i], masters[i], at::kFloat, "pack_weights_", "a master");
    check(high[i], masters[i], at::kBFloat16, "pack_weights_", "a high half");
    check(low[i], masters[i], at::kShort, "pack_weights_", "a low half");
  }
  const std::vector<at::Tensor> from = dense(masters);
  const Written to_high(high, from);
  const Written to_low(low, from);
  for_each_piece(from, [&](const Piece& piece) {
    const auto* bits = static_cast<const uint32_t*>(from[piece.tensor].const_data_ptr());
    auto* upper = to_high.data<uint16_t>(piece.tensor);
    auto* lower = to_low.data<uint16_t>(piece.tensor);
    for (int64_t i = piece.begin; i < piece.end; ++i) {
      const uint32_t halves = cuda::pack_weight(bits[i]);
      upper[i] = static_cast<uint16_t>(halves >> 16);
      lower[i] = static_cast<uint16_t>(halves);
    }
  });
  to_high.finish();
  to_low.finish();
}

void unpack_weights_(at::TensorList high, at::TensorList low, at::TensorList masters) {
  check_count("unpack_weights_", masters.size(), high.size(), "high halves");
  check_count("unpack_weights_", masters.size(), low.size(), "low halves");
  std::vector<at::Tensor> lower;
  const std::vector<at::Tensor> upper = dense(high);
  for (size_t i = 0; i < masters.size(); ++i) {
    check(masters[i], high[i], at::kFloat, "unpack_weights_", "a master");
    check(high[i], high[i], at::kBFloat16, "unpack_weights_", "a high half");
    check(low[i], high[i], at::kShort, "unpack_weights_", "a low half");
    lower.push_back(ordered_as(low[i], upper[i]));
  }
  const Written to(masters, upper);
  for_each_piece(upper, [&](const Piece& piece) {
    const auto* high_bits = static_cast<const uint16_t*>(upper[piece.tensor].const_data_ptr());
    const auto* low_bits = static_cast<const uint16_t*>(lower[piece.tensor].const_data_ptr());
    auto* bits = to.data<uint32_t>(piece.tensor);
    for (int64_t i = piece.begin; i < piece.end; ++i) {
      bits[i] = cuda::unpack_weight(high_bits[i], low_bits[i]);
    }
  });
  to.finish();
}

namespace {

uint16_t round_weight(uint32_t bits, uint32_t draw) {
  const uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) return static_cast<uint16_t>((bits >> 16 & 0x8000U) | 0x7FC0U);
  return static_cast<uint16_t>((bits + draw) >> 16);
}

}  // namespace

void round_weights_(at::TensorList masters, at::TensorList out, int64_t seed, int64_t step) {
  check_count("round_weights_", masters.size(), out.size(), "outputs");
  for (size_t i = 0; i < masters.size(); ++i) {
    check(masters[i], masters[i], at::kFloat, "round_weights_", "a master");
    check(out[i], masters[i], at::kBFloat16, "round_weights_", "an output");
  }
  std::vector<at::Tensor> from;
  for (const at::Tensor& master : masters) {
    from.push_back(master.contiguous());
  }
  const Written to(out, from);
  const uint32_t key = cuda::seed_of(step) + static_cast<uint32_t>(seed) * 0xC2B2AE3DU;
  for_each_piece(from, [&](const Piece& piece) {
    const auto* bits = static_cast<const uint32_t*>(from[piece.tensor].const_data_ptr());
    auto* rounded = to.data<uint16_t>(piece.tensor);
    const uint32_t salted = key + static_cast<uint32_t>(piece.tensor) * 0x27D4EB2FU;
    for (int64_t i = piece.begin; i < piece.end; ++i) {
      const uint32_t draw = cuda::random_bits(static_cast<uint32_t>(i), salted) & 0xFFFFU;
      rounded[i] = round_weight(bits[i], draw);
    }
  });
  to.finish();
}

}  // namespace amp_plugin
