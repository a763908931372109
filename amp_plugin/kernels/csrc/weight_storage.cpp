// cast, pack_weights_, unpack_weights_ and round_weights_ on the CPU: many tensors, one pass over all of
// them.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/FunctionRef.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "cpu_ops.h"
#include "cuda_layout.h"
#include "memory_order.h"
#include "versions.h"

namespace amp_plugin {
namespace {

constexpr int64_t kPiece = 32768;  // elements; a multiple of kDraws

// Elements [begin, end) of the tensors with this number.
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

// Tensors to write in the memory order of others; finish() copies back what is not written in place.
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

// Of the loop over pieces there is one, whatever is run.
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

using Copy = void (*)(const void* src, void* out, int64_t begin, int64_t count);

template <typename From, typename To>
void copy(const void* src, void* out, int64_t begin, int64_t count) {
  at::vec::convert(static_cast<const From*>(src) + begin, static_cast<To*>(out) + begin, count);
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
  std::vector<at::Tensor> from, to;
  std::vector<Copy> copies;
  for (size_t i = 0; i < src.size(); ++i) {
    const Copy run = copy_for(src[i].scalar_type(), out[i].scalar_type());
    if (run == nullptr || !casts_in_order(src[i], out[i])) {
      out[i].copy_(src[i]);
      continue;
    }
    from.push_back(src[i]);
    to.push_back(out[i]);
    copies.push_back(run);
  }
  for_each_piece(from, [&](const Piece& piece) {
    const size_t i = piece.tensor;
    copies[i](from[i].const_data_ptr(), to[i].mutable_data_ptr(), piece.begin, piece.end - piece.begin);
  });
  increment_versions(to);
}

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

constexpr int kDraws = 8;  // numbers of 16 bits from one call of the generator

// Philox 4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = uint64_t{0xD2511F53} * counter[0];
    const uint64_t second = uint64_t{0xCD9E8D57} * counter[2];
    counter = {
        static_cast<uint32_t>(second >> 32) ^ counter[1] ^ key0, static_cast<uint32_t>(second),
        static_cast<uint32_t>(first >> 32) ^ counter[3] ^ key1, static_cast<uint32_t>(first)};
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return counter;
}

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
  const auto key0 = static_cast<uint32_t>(seed);
  const auto key1 = static_cast<uint32_t>(step);
  for_each_piece(from, [&](const Piece& piece) {
    const auto* bits = static_cast<const uint32_t*>(from[piece.tensor].const_data_ptr());
    auto* rounded = to.data<uint16_t>(piece.tensor);
    for (int64_t i = piece.begin; i < piece.end; i += kDraws) {
      const auto block = static_cast<uint64_t>(i / kDraws);
      const std::array<uint32_t, 4> drawn = philox(
          {static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32),
           static_cast<uint32_t>(piece.tensor), 0},
          key0, key1);
      for (int64_t j = 0; j < std::min<int64_t>(kDraws, piece.end - i); ++j) {
        const uint32_t word = drawn[j / 2];
        rounded[i + j] = round_weight(bits[i + j], j % 2 ? word >> 16 : word & 0xFFFFU);
      }
    }
  });
  to.finish();
}

}  // namespace amp_plugin
