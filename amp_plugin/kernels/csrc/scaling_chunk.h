// Works on one chunk of one gradient: reads it once and writes it at most once.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <c10/util/complex.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <tuple>
#include <type_traits>

namespace amp_plugin {

enum class Norm : uint8_t { none, one, two, infinity, any };

constexpr uint8_t kInf = 1;
constexpr uint8_t kNan = 2;

// The contribution of one chunk to the result.
struct Partial {
  // depends on the norm: the sum of |x|^p, the count of x != 0, or the largest or smallest |x|
  double power = 0.0;
  uint8_t flags = 0;
};

template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

// The elements of one vector of T, as vectors of Wide<T>: one vector for float and double, two for float16
// and bfloat16.
template <typename T>
struct Lanes {
  using Stored = at::vec::Vectorized<T>;
  using Vec = at::vec::Vectorized<Wide<T>>;
  static constexpr int64_t kSize = Stored::size();
  static constexpr int kParts = kSize / Vec::size();
  Vec part[kParts];

  static Lanes load(const T* data, int64_t count) {
    const Stored stored = count == kSize ? Stored::loadu(data) : Stored::loadu(data, count);
    if constexpr (kParts == 1) {
      return {{stored}};
    } else {
      auto [low, high] = at::vec::convert_to_float<T>(stored);
      return {{low, high}};
    }
  }

  void store(T* data, int64_t count) const {
    if constexpr (kParts == 1) {
      part[0].store(data, static_cast<int>(count));
    } else {
      at::vec::convert_from_float<T>(part[0], part[1]).store(data, static_cast<int>(count));
    }
  }
};

template <Norm norm, typename Vec>
inline Vec accumulate(const Vec& sum, const Vec& x) {
  if constexpr (norm == Norm::two) {
    return at::vec::fmadd(x, x, sum);
  } else if constexpr (norm == Norm::one) {
    return sum + x.abs();
  } else if constexpr (norm == Norm::infinity) {
    return at::vec::maximum(sum, x.abs());
  } else {
    return sum;
  }
}

// Returns the sum of a vector's lanes, added in double, or their largest. A NaN counts as the largest.
template <Norm norm, typename Vec>
inline double reduce(const Vec& lanes) {
  constexpr int kChains = 4;
  const auto join = [](double a, double b) {
    if constexpr (norm == Norm::infinity) return std::isnan(b) || b > a ? b : a;
    return a + b;
  };
  typename Vec::value_type values[Vec::size()];
  lanes.store(values);
  double total[kChains] = {};
  for (int i = 0; i < Vec::size(); ++i)
    total[i % kChains] = join(total[i % kChains], static_cast<double>(values[i]));
  return join(join(total[0], total[1]), join(total[2], total[3]));
}

// Returns the flags of the elements. Rarely needed and the same for all norms, so it is not inlined into each
// loop.
template <typename T>
[[gnu::noinline]] uint8_t element_flags(const T* data, int64_t count) {
  uint8_t flags = 0;
  for (int64_t i = 0; i < count; ++i) {
    const auto x = static_cast<Wide<T>>(data[i]);
    flags |= std::isnan(x) ? kNan : (std::isinf(x) ? kInf : 0);
  }
  return flags;
}

// Returns the sum of |x|^p, computed in double. It serves norms that have no loop of their own, and elements
// whose powers leave float32's range. If p is 0, it counts the nonzero elements. If p is inf or -inf, it
// returns the largest or the smallest |x|.
template <typename X>
[[gnu::noinline]] double any_power(const X* data, int64_t count, double p) {
  const bool smallest = p == -std::numeric_limits<double>::infinity();
  double result = smallest ? std::numeric_limits<double>::infinity() : 0.0;
  for (int64_t i = 0; i < count; ++i) {
    double magnitude;
    if constexpr (c10::is_complex<X>::value) {
      magnitude = std::hypot(static_cast<double>(data[i].real()), static_cast<double>(data[i].imag()));
    } else {
      magnitude = std::abs(static_cast<double>(static_cast<Wide<X>>(data[i])));
    }
    if (smallest) {
      result = std::isnan(magnitude) || magnitude < result ? magnitude : result;
    } else if (p == std::numeric_limits<double>::infinity()) {
      result = std::isnan(magnitude) || magnitude > result ? magnitude : result;
    } else {
      result += p == 2.0 ? magnitude * magnitude
          : p == 0.0     ? static_cast<double>(magnitude != 0.0)
                         : std::pow(magnitude, p);
    }
  }
  return result;
}

// The loop over a chunk. It reads each x, adds it to the norm, and checks that x * factor is finite. If
// `write`, it also writes the product.
template <typename T, Norm norm, bool write>
Partial run_chunk(T* data, int64_t count, Wide<T> factor) {
  using L = Lanes<T>;
  using Vec = typename L::Vec;
  constexpr int kAccumulators = 4;
  constexpr int kUnroll = kAccumulators / L::kParts;
  const Vec scale(factor);
  const Vec zero(0);
  Vec sum[kAccumulators] = {zero, zero, zero, zero};
  Vec bad[kAccumulators] = {zero, zero, zero, zero};  // stays 0 as long as all products are finite

  const auto step = [&](T* at, int64_t size, int first) {
    L x = L::load(at, size);
    for (int part = 0; part < L::kParts; ++part) {
      sum[first + part] = accumulate<norm>(sum[first + part], x.part[part]);
      if constexpr (write) {
        x.part[part] = x.part[part] * scale;
      }
      bad[first + part] = at::vec::fmadd(x.part[part], zero, bad[first + part]);
    }
    if constexpr (write) {
      x.store(at, size);
    }
  };

  // The chunk is read as several streams, so that more loads are in flight. The elements are added in the
  // same order with and without writing. So a clip that is part of the step and a clip in place give the same
  // bits.
  const int64_t stream = count / (kUnroll * L::kSize) * L::kSize;
  for (int64_t i = 0; i < stream; i += L::kSize) {
    for (int u = 0; u < kUnroll; ++u) {
      step(data + u * stream + i, L::kSize, u * L::kParts);
    }
  }
  for (int64_t i = kUnroll * stream; i < count; i += L::kSize) {
    step(data + i, std::min(L::kSize, count - i), 0);
  }

  Partial result;
  constexpr auto kAllZero = (int64_t{1} << Vec::size()) - 1;
  const Vec any_bad = (bad[0] + bad[1]) + (bad[2] + bad[3]);
  const bool finite = (any_bad.zero_mask() & kAllZero) == kAllZero;
  // A product that is finite in float32 can become infinite when it is rounded to 16 bits.
  const bool may_round_up = write && sizeof(T) < 4 && factor > Wide<T>(1);
  if (!finite || may_round_up) {
    result.flags = element_flags(data, count);
  }
  if constexpr (norm == Norm::infinity) {
    result.power =
        reduce<norm>(at::vec::maximum(at::vec::maximum(sum[0], sum[1]), at::vec::maximum(sum[2], sum[3])));
  } else if constexpr (norm != Norm::none) {
    result.power = reduce<norm>((sum[0] + sum[1]) + (sum[2] + sum[3]));
  }
  return result;
}

}  // namespace amp_plugin
