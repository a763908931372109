// One chunk of one gradient: read it once, write it at most once.
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

// What one chunk adds to the result.
struct Partial {
  double power = 0.0;  // sum of |x|^p, count, largest or smallest |x|: see Norm
  uint8_t flags = 0;
};

template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

// A vector of T as one (float, double) or two (float16, bfloat16) vectors of Wide<T>.
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

// The lanes of a vector added up in double, or the largest of them.
template <Norm norm, typename Vec>
inline double reduce(const Vec& lanes) {
  constexpr int kChains = 4;
  typename Vec::value_type values[Vec::size()];
  lanes.store(values);
  double total[kChains] = {};
  for (int i = 0; i < Vec::size(); ++i) {
    double& chain = total[i % kChains];
    const auto value = static_cast<double>(values[i]);
    if constexpr (norm == Norm::infinity) {
      chain = std::isnan(value) || value > chain ? value : chain;
    } else {
      chain += value;
    }
  }
  if constexpr (norm == Norm::infinity) {
    for (const double chain : total) {
      total[0] = std::isnan(chain) || chain > total[0] ? chain : total[0];
    }
    return total[0];
  }
  return (total[0] + total[1]) + (total[2] + total[3]);
}

// Rare, and the same for all norms: not made anew in each loop that calls it.
template <typename T>
[[gnu::noinline]] uint8_t element_flags(const T* data, int64_t count) {
  uint8_t flags = 0;
  for (int64_t i = 0; i < count; ++i) {
    const auto x = static_cast<Wide<T>>(data[i]);
    flags |= std::isnan(x) ? kNan : (std::isinf(x) ? kInf : 0);
  }
  return flags;
}

template <typename T>
[[gnu::noinline]] double sum_of_squares(const T* data, int64_t count) {
  double sum = 0.0;
  for (int64_t i = 0; i < count; ++i) {
    const auto x = static_cast<double>(static_cast<Wide<T>>(data[i]));
    sum += x * x;
  }
  return sum;
}

// |x|^p for the norms without a loop of their own: p is 0, -inf or any other number.
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
      result += p == 0.0 ? static_cast<double>(magnitude != 0.0) : std::pow(magnitude, p);
    }
  }
  return result;
}

// The one loop: x is read, its norm taken, x * factor checked for finiteness and, if asked, written.
template <typename T, Norm norm, bool write>
Partial run_chunk(T* data, int64_t count, Wide<T> factor) {
  using L = Lanes<T>;
  using Vec = typename L::Vec;
  constexpr int kAccumulators = 4;
  constexpr int kUnroll = kAccumulators / L::kParts;
  const Vec scale(factor);
  const Vec zero(0);
  Vec sum[kAccumulators] = {zero, zero, zero, zero};
  Vec bad[kAccumulators] = {zero, zero, zero, zero};  // stays 0 while all products are finite

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

  // Several streams, a part of the chunk each: more loads are in flight. With and without writing, the same
  // elements are added up in the same order: clipping folded or in place gives the same bits.
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
