// norm_check, unscale_ and multiply_ on the CPU: one pass over all gradients, in chunks.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include "cpu_ops.h"
#include "one_value.h"
#include "scaling_chunk.h"
#include "tensor_memory.h"

namespace amp_plugin {
namespace {

// Elements of a chunk. Float32 partial sums are exact enough for so many, and the chunk fits into the L2
// cache.
constexpr int64_t kChunk = 32768;
// Elements that a thread processes at a time. They take about 40 us, much longer than starting and joining
// threads.
constexpr int64_t kTask = 8 * kChunk;

using ChunkFunction = Partial (*)(void* data, int64_t count, double factor, double p);

struct Chunk {
  char* data;
  int64_t count;
  int64_t tensor;
  ChunkFunction run;
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

bool takes_extreme(double p) { return std::isinf(p); }

// Return true if all squares are within float32's range. A square can leave it although the element and the
// norm are in range.
template <typename T>
bool is_exact(double sum_of_squares) {
  constexpr double kSmallest = 1e-26;  // below this, squares lost to underflow would matter
  return std::is_same_v<T, double> || (sum_of_squares >= kSmallest && std::isfinite(sum_of_squares));
}

template <typename T, Norm norm, bool write>
Partial chunk_of_reals(void* data, int64_t count, double factor, double p) {
  auto* values = static_cast<T*>(data);
  if constexpr (norm == Norm::any) {
    const double power = any_power(values, count, p);
    Partial partial = run_chunk<T, Norm::none, write>(values, count, static_cast<Wide<T>>(factor));
    partial.power = power;
    return partial;
  } else if constexpr (write && (norm == Norm::one || norm == Norm::infinity)) {
    // Rare, so it takes two passes instead of a loop of its own.
    const double power = chunk_of_reals<T, norm, false>(data, count, factor, p).power;
    Partial partial = run_chunk<T, Norm::none, true>(values, count, static_cast<Wide<T>>(factor));
    partial.power = power;
    return partial;
  } else {
    Partial partial = run_chunk<T, norm, write>(values, count, static_cast<Wide<T>>(factor));
    if constexpr (norm == Norm::two) {
      if (partial.flags == 0 && !is_exact<T>(partial.power)) {
        // The values have been multiplied already if `write`. Divide the result to undo that.
        partial.power = sum_of_squares(values, count) / (write ? factor * factor : 1.0);
      }
    } else if constexpr (norm == Norm::one) {
      if (partial.flags == 0 && !std::isfinite(partial.power)) partial.power = any_power(values, count, p);
    }
    return partial;
  }
}

// Complex numbers are processed as pairs of reals, except in norms that need their magnitudes.
template <typename T, Norm norm, bool write>
Partial chunk_of_complex(void* data, int64_t count, double factor, double p) {
  if constexpr (norm == Norm::two || norm == Norm::none) {
    return chunk_of_reals<T, norm, write>(data, 2 * count, factor, p);
  } else {
    const double power = any_power(static_cast<c10::complex<T>*>(data), count, p);
    Partial partial =
        run_chunk<T, Norm::none, write>(static_cast<T*>(data), 2 * count, static_cast<T>(factor));
    partial.power = power;
    return partial;
  }
}

template <Norm norm, bool write>
ChunkFunction function_for(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return chunk_of_reals<float, norm, write>;
    case at::kDouble: return chunk_of_reals<double, norm, write>;
    case at::kHalf: return chunk_of_reals<at::Half, norm, write>;
    case at::kBFloat16: return chunk_of_reals<at::BFloat16, norm, write>;
    case at::kComplexFloat: return chunk_of_complex<float, norm, write>;
    case at::kComplexDouble: return chunk_of_complex<double, norm, write>;
    default:
      TORCH_CHECK_TYPE(
          false, "amp_plugin: gradients of dtype ", type,
          " are not supported; allowed are float16, bfloat16, float32, float64, complex64 and complex128.");
  }
}

template <bool write>
ChunkFunction function_for(at::ScalarType type, Norm norm) {
  switch (norm) {
    case Norm::none: return function_for<Norm::none, write>(type);
    case Norm::one: return function_for<Norm::one, write>(type);
    case Norm::two: return function_for<Norm::two, write>(type);
    case Norm::infinity: return function_for<Norm::infinity, write>(type);
    default: return function_for<Norm::any, write>(type);
  }
}

// Gradients as memory without gaps. If a gradient has gaps, a dense copy is processed and then written back.
class Flattened {
 public:
  explicit Flattened(at::TensorList grads) {
    flat_.reserve(grads.size());
    for (const at::Tensor& grad : grads) {
      TORCH_CHECK(
          grad.device().is_cpu(), "amp_plugin: all gradients of one call must be on one device; got cpu and ",
          grad.device(), ".");
      TORCH_CHECK(
          grad.layout() == at::kStrided, "amp_plugin: a gradient has layout ", grad.layout(),
          "; pass the values of sparse gradients.");
      if (grad.is_non_overlapping_and_dense()) {
        flat_.push_back(grad.unsafeGetTensorImpl());
      } else {
        copies_.emplace_back(grad, grad.contiguous());
        flat_.push_back(copies_.back().second.unsafeGetTensorImpl());
      }
    }
  }

  const std::vector<c10::TensorImpl*>& tensors() const { return flat_; }

  void write_back(at::TensorList grads) const {
    for (const auto& [grad, copy] : copies_) {
      grad.copy_(copy);
    }
    increment_versions(grads);
  }

 private:
  std::vector<c10::TensorImpl*> flat_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
};

// Prefetches the beginning of a later chunk. For small tensors that is most of the chunk, and the hardware
// cannot predict where the next tensor lies.
void fetch_ahead(const Chunk& chunk) {
  constexpr int64_t kLine = 64, kMost = 1024;  // bytes, both
  const int64_t bytes = std::min<int64_t>(chunk.count * 4, kMost);
  for (int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(chunk.data + at);
}

template <bool write>
std::vector<Chunk> cut(const std::vector<c10::TensorImpl*>& tensors, Norm norm) {
  constexpr size_t kAhead = 8;  // how many storages ahead to prefetch
  std::vector<Chunk> chunks;
  chunks.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (i + kAhead < tensors.size())
      __builtin_prefetch(tensors[i + kAhead]->unsafe_storage().unsafeGetStorageImpl());
    const c10::TensorImpl& tensor = *tensors[i];
    const at::ScalarType type = c10::typeMetaToScalarType(tensor.dtype());
    const ChunkFunction run = function_for<write>(type, norm);
    const auto size = static_cast<int64_t>(tensor.itemsize());
    const int64_t numel = tensor.numel();
    auto* data = numel ? static_cast<char*>(const_cast<void*>(tensor.data())) : nullptr;
    for (int64_t begin = 0; begin < numel; begin += kChunk) {
      chunks.push_back({data + begin * size, std::min(kChunk, numel - begin), static_cast<int64_t>(i), run});
    }
  }
  return chunks;
}

// Returns the number of the first chunk of each task. A task has about kTask elements. The division is
// independent of the number of threads, and so are the results.
std::vector<size_t> share(const std::vector<Chunk>& chunks) {
  std::vector<size_t> first{0};
  int64_t elements = 0;
  for (size_t i = 0; i < chunks.size(); ++i) {
    elements += chunks[i].count;
    if (elements >= kTask || i + 1 == chunks.size()) {
      first.push_back(i + 1);
      elements = 0;
    }
  }
  return first;
}

template <bool write>
Result run_all(const std::vector<c10::TensorImpl*>& tensors, Norm norm, double factor, double p) {
  const std::vector<Chunk> chunks = cut<write>(tensors, norm);
  const std::vector<size_t> first = share(chunks);
  std::vector<Partial> partials(chunks.size());
  at::parallel_for(0, static_cast<int64_t>(first.size()) - 1, 1, [&](int64_t begin, int64_t end) {
    for (size_t i = first[begin]; i < first[end]; ++i) {
      if (i + 1 < first[end]) fetch_ahead(chunks[i + 1]);
      partials[i] = chunks[i].run(chunks[i].data, chunks[i].count, factor, p);
    }
  });
  Result result;
  result.flags.resize(tensors.size());
  result.power = p == -std::numeric_limits<double>::infinity() ? -p : 0.0;
  for (size_t i = 0; i < chunks.size(); ++i) {
    const double power = partials[i].power;
    result.flags[chunks[i].tensor] |= partials[i].flags;
    if (!takes_extreme(p)) {
      result.power += power;
    } else if (std::isnan(power) || (p > 0 ? power > result.power : power < result.power)) {
      result.power = power;
    }
  }
  if (chunks.empty()) {
    result.power = 0.0;
  }
  return result;
}

Measured measured(const Result& result, double factor, double p) {
  double norm = result.power;
  if (!takes_extreme(p) && p != 0.0) {
    norm = p == 2.0 ? std::sqrt(norm) : std::pow(norm, 1.0 / p);
  }
  if (p != 0.0) {
    norm *= std::abs(factor);
  }
  at::Tensor flags = at::empty({static_cast<int64_t>(result.flags.size())}, at::kByte);
  std::copy(result.flags.begin(), result.flags.end(), flags.mutable_data_ptr<uint8_t>());
  return {tensor_of(norm), tensor_of(result.found()), flags};
}

// Returns the factor that gradients are multiplied by. If a scale is given, 1 / scale is rounded to the
// scale's dtype.
double factor_of(const at::Tensor& inv_scale, bool is_scale) {
  const double value = one_value(inv_scale, "inv_scale");
  if (!is_scale) return value;
  return inv_scale.scalar_type() == at::kFloat ? 1.0F / static_cast<float>(value) : 1.0 / value;
}

}  // namespace

Measured norm_check(at::TensorList grads, const at::Tensor& inv_scale, double p, bool is_scale) {
  const double factor = factor_of(inv_scale, is_scale);
  const Flattened flattened(grads);
  return measured(run_all<false>(flattened.tensors(), norm_of(p), factor, p), factor, p);
}

Measured unscale_(at::TensorList grads, const at::Tensor& inv_scale, double p, bool is_scale) {
  const double factor = factor_of(inv_scale, is_scale);
  if (factor == 1.0) {
    return norm_check(grads, inv_scale, p, is_scale);
  }
  const Flattened flattened(grads);
  const Result result = run_all<true>(flattened.tensors(), norm_of(p), factor, p);
  flattened.write_back(grads);
  return measured(result, factor, p);
}

at::Tensor multiply_(
    at::TensorList grads, const at::Tensor& factor, std::optional<double> max_norm,
    const OptionalTensor& found_inf) {
  const double given = one_value(factor, "factor");
  const double value = max_norm ? clip_factor_of(static_cast<float>(given), *max_norm, found_inf) : given;
  if (value == 1.0) {
    return tensor_of(0.0);
  }
  const Flattened flattened(grads);
  const Result result = run_all<true>(flattened.tensors(), Norm::none, value, 2.0);
  flattened.write_back(grads);
  return tensor_of(result.found());
}

}  // namespace amp_plugin
