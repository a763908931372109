// norm_check, unscale_ and multiply_ on the CPU: one pass over all gradients, in pieces.

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include "cpu_ops.h"
#include "one_value.h"
#include "pieces.h"
#include "scaling_chunk.h"
#include "tensor_memory.h"

namespace amp_plugin {
namespace {

// Elements that a thread processes at a time.
constexpr int64_t kTask = 8 * kPiece;

using PieceFunction = Partial (*)(void* data, int64_t count, Norm norm, double p, double factor);

// A gradient without gaps, and the loop over its pieces.
struct Gradient {
  char* data;
  int64_t itemsize;
  PieceFunction run;
};

struct Result {
  double power = 0.0;
  std::vector<uint8_t> flags;

  double found() const {
    return std::any_of(flags.begin(), flags.end(), [](uint8_t flag) { return flag != 0; }) ? 1.0 : 0.0;
  }
};

Norm norm_of(double p) {
  if (p == 2.0) return Norm::two;
  if (p == 1.0) return Norm::one;
  if (p == std::numeric_limits<double>::infinity()) return Norm::infinity;
  return Norm::any;
}

// Return true if all squares are within float32's range. A square can leave it although the element and the
// norm are in range.
template <typename T>
bool is_exact(double sum_of_squares) {
  constexpr double kSmallest = 1e-26;  // below this, squares lost to underflow would matter
  return std::is_same_v<T, double> || (sum_of_squares >= kSmallest && std::isfinite(sum_of_squares));
}

// Multiplies and checks the elements of a piece. The contribution of the piece to the norm is known already:
// `power`.
template <typename T, bool write>
Partial with_power(double power, T* values, int64_t count, double factor) {
  Partial partial = run_chunk<T, Norm::none, write>(values, count, static_cast<Wide<T>>(factor));
  partial.power = power;
  return partial;
}

template <typename T, bool write>
Partial piece_of_reals(void* data, int64_t count, Norm norm, double p, double factor) {
  auto* values = static_cast<T*>(data);
  const auto wide = static_cast<Wide<T>>(factor);
  if (norm == Norm::none) return run_chunk<T, Norm::none, write>(values, count, wide);
  if (norm == Norm::two) {
    Partial partial = run_chunk<T, Norm::two, write>(values, count, wide);
    if (partial.flags == 0 && !is_exact<T>(partial.power)) {
      // The values have been multiplied already if `write`. Divide the result to undo that.
      partial.power = any_power(values, count, p) / (write ? factor * factor : 1.0);
    }
    return partial;
  }
  if (norm == Norm::any) return with_power<T, write>(any_power(values, count, p), values, count, factor);
  // The other norms are rare. With `write` they take two passes instead of a loop of their own.
  Partial partial = norm == Norm::one ? run_chunk<T, Norm::one, false>(values, count, wide)
                                      : run_chunk<T, Norm::infinity, false>(values, count, wide);
  if (norm == Norm::one && partial.flags == 0 && !std::isfinite(partial.power))
    partial.power = any_power(values, count, p);
  return write ? with_power<T, write>(partial.power, values, count, factor) : partial;
}

// Complex numbers are processed as pairs of reals, except in norms that need their magnitudes.
template <typename T, bool write>
Partial piece_of_complex(void* data, int64_t count, Norm norm, double p, double factor) {
  if (norm == Norm::two || norm == Norm::none)
    return piece_of_reals<T, write>(data, 2 * count, norm, p, factor);
  const double power = any_power(static_cast<c10::complex<T>*>(data), count, p);
  return with_power<T, write>(power, static_cast<T*>(data), 2 * count, factor);
}

template <bool write>
PieceFunction function_for(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return piece_of_reals<float, write>;
    case at::kDouble: return piece_of_reals<double, write>;
    case at::kHalf: return piece_of_reals<at::Half, write>;
    case at::kBFloat16: return piece_of_reals<at::BFloat16, write>;
    case at::kComplexFloat: return piece_of_complex<float, write>;
    case at::kComplexDouble: return piece_of_complex<double, write>;
    default:
      TORCH_CHECK_TYPE(
          false, "amp_plugin: gradients of dtype ", type,
          " are not supported; allowed are float16, bfloat16, float32, float64, complex64 and complex128.");
  }
}

void check(at::TensorList grads) {
  for (const at::Tensor& grad : grads) {
    TORCH_CHECK(
        grad.device().is_cpu(), "amp_plugin: all gradients of one call must be on one device; got cpu and ",
        grad.device(), ".");
    TORCH_CHECK(
        grad.layout() == at::kStrided, "amp_plugin: a gradient has layout ", grad.layout(),
        "; pass the values of sparse gradients.");
  }
}

// Prefetches the beginning of a later piece. For small tensors that is most of the piece, and the hardware
// cannot predict where the next tensor lies.
void fetch_ahead(const char* data, const Piece& piece) {
  constexpr int64_t kLine = 64, kMost = 1024;  // bytes, both
  const int64_t bytes = std::min<int64_t>((piece.end - piece.begin) * 4, kMost);
  for (int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(data + at);
}

template <bool write>
Result run_all(at::TensorList grads, Norm norm, double factor, double p) {
  constexpr size_t kAhead = 8;  // how many storages ahead to prefetch
  std::vector<Gradient> gradients;
  std::vector<int64_t> numels;
  gradients.reserve(grads.size());
  numels.reserve(grads.size());
  for (size_t i = 0; i < grads.size(); ++i) {
    if (i + kAhead < grads.size())
      __builtin_prefetch(grads[i + kAhead].unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
    const c10::TensorImpl& grad = *grads[i].unsafeGetTensorImpl();
    numels.push_back(grad.numel());
    gradients.push_back(
        {.data = numels.back() ? static_cast<char*>(const_cast<void*>(grad.data())) : nullptr,
         .itemsize = static_cast<int64_t>(grad.itemsize()),
         .run = function_for<write>(c10::typeMetaToScalarType(grad.dtype()))});
  }
  const std::vector<Piece> pieces = pieces_of(numels);
  const auto data_of = [&](const Piece& piece) {
    return gradients[piece.tensor].data + piece.begin * gradients[piece.tensor].itemsize;
  };
  std::vector<Partial> partials(pieces.size());
  for_each_task(pieces, kTask, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      if (i + 1 < end) fetch_ahead(data_of(pieces[i + 1]), pieces[i + 1]);
      const Piece& piece = pieces[i];
      partials[i] = gradients[piece.tensor].run(data_of(piece), piece.end - piece.begin, norm, p, factor);
    }
  });
  // The partial results are joined in the order of the pieces, so the number of threads does not matter.
  Result result;
  result.flags.resize(grads.size());
  result.power = p == -std::numeric_limits<double>::infinity() && !pieces.empty() ? -p : 0.0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const double power = partials[i].power;
    result.flags[pieces[i].tensor] |= partials[i].flags;
    if (!std::isinf(p)) {
      result.power += power;
    } else if (std::isnan(power) || (p > 0 ? power > result.power : power < result.power)) {
      result.power = power;
    }
  }
  return result;
}

at::Tensor tensor_of(double value) {
  const at::Tensor result = new_number(at::kCPU);
  *result.mutable_data_ptr<float>() = static_cast<float>(value);
  return result;
}

Measured measured(const Result& result, double factor, double p) {
  double norm = result.power;
  if (!std::isinf(p) && p != 0.0) {
    norm = p == 2.0 ? std::sqrt(norm) : std::pow(norm, 1.0 / p);
  }
  if (p != 0.0) {
    norm *= std::abs(factor);
  }
  at::Tensor flags = at::empty({static_cast<int64_t>(result.flags.size())}, at::kByte);
  std::copy(result.flags.begin(), result.flags.end(), flags.mutable_data_ptr<uint8_t>());
  return {tensor_of(norm), tensor_of(result.found()), flags};
}

}  // namespace

Measured norm_check(at::TensorList grads, const at::Tensor& inv_scale, double p, bool is_scale) {
  const double factor = one_value(inv_scale, "inv_scale", is_scale);
  check(grads);
  return measured(run_all<false>(Dense(grads).tensors(), norm_of(p), factor, p), factor, p);
}

Measured unscale_(at::TensorList grads, const at::Tensor& inv_scale, double p, bool is_scale) {
  const double factor = one_value(inv_scale, "inv_scale", is_scale);
  if (factor == 1.0) return norm_check(grads, inv_scale, p, is_scale);
  check(grads);
  const Dense dense(grads);
  const Result result = run_all<true>(dense.tensors(), norm_of(p), factor, p);
  dense.finish();
  return measured(result, factor, p);
}

at::Tensor multiply_(
    at::TensorList grads, const at::Tensor& factor, std::optional<double> max_norm,
    const OptionalTensor& found_inf) {
  double value = one_value(factor, "factor");
  if (max_norm) {
    const float* found = found_inf ? found_inf->const_data_ptr<float>() : nullptr;
    value = cuda::clip_factor_of(static_cast<float>(value), static_cast<float>(*max_norm), found);
  }
  if (value == 1.0) return tensor_of(0.0);
  check(grads);
  const Dense dense(grads);
  const Result result = run_all<true>(dense.tensors(), Norm::none, value, 2.0);
  dense.finish();
  return tensor_of(result.found());
}

}  // namespace amp_plugin
