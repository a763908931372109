// The element types of gradients: how 16 bytes of memory are converted to numbers and back.
//
// No header of the CUDA toolkit is needed. float16 and bfloat16 are 16-bit patterns here. Arithmetic is in
// float32, or in float64 for float64 elements. The functions inside #ifdef __CUDACC__ consist of GPU
// instructions. If a host compiler builds these sources, it must be given functions with the same names.
#pragma once

#include "../csrc/cuda_layout.h"

namespace amp_plugin::cuda {

#ifdef __CUDACC__
__device__ inline float half_to_float(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

__device__ inline u16 float_to_half(float value) {  // rounds to nearest, ties to even
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// The next two functions are one instruction each. For numbers between 1 and 2, the logarithm has an absolute
// error below 2^-22. The power of two has a relative error below 2^-22.
__device__ inline float log2_approximate(float x) {
  float value;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
  return value;
}

__device__ inline float exp2_approximate(float x) {
  float value;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
  return value;
}

// Adds 1 to the count of finished blocks, and returns the count before. This one instruction replaces an
// atomic addition between two memory fences: it releases the writes of this block, and acquires the writes of
// the blocks that were counted before.
__device__ inline u32 count_block(u32* count) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(count) : "memory");
  return before;
}

// Asks for the line of memory at an address, so that a later load finds it in the L2 cache.
__device__ inline void prefetch(u64 address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

// Returns `high` with its lowest byte replaced by byte `i` of `word`.
__device__ inline u32 byte_behind(u32 high, u32 word, int i) { return __byte_perm(word, high, 0x7650 + i); }

// Returns byte `kByte` of each of four words. For 11 it returns 255 for each word whose highest bit is set,
// and 0 for the others.
template <int kByte>
__device__ inline u32 bytes_of(const u32 (&words)[4]) {
  u32 first, last;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(first) : "r"(words[0]), "r"(words[1]), "n"(0x11 * kByte + 0x40));
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(last) : "r"(words[2]), "r"(words[3]), "n"(0x11 * kByte + 0x40));
  return __byte_perm(first, last, 0x5410);
}

// Returns the square root of a number between 2^-100 and 2^127, rounded as sqrtf does. No branch handles
// other numbers.
__device__ inline float moderate_root(float x) {
  float inverse;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  const float root = x * inverse, half = inverse * 0.5f;
  return fmaf(fmaf(-root, root, x), half, root);
}

// Returns 1 / x for x between 2^-125 and 2^125, rounded as a division is. No branch handles other numbers.
__device__ inline float moderate_inverse(float x) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  return fmaf(-fmaf(x, inverse, -1.0f), inverse, inverse);
}

// Returns a / b for |a| between 2^-95 and 2^62 and |b| between 2^-64 and 2^30, rounded as a division is. No
// branch handles other numbers.
__device__ inline float moderate_quotient(float a, float b) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(b));
  inverse = fmaf(inverse, fmaf(-b, inverse, 1.0f), inverse);
  const float quotient = a * inverse;
  return fmaf(inverse, fmaf(-b, quotient, a), quotient);
}
#endif

// The largest number in a warp.
__device__ inline u32 warp_max(u32 number) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(0xffffffffu, number);
#else
  for (u32 distance = 16; distance > 0; distance /= 2) {
    const u32 other = __shfl_xor_sync(0xffffffffu, number, distance);
    number = other > number ? other : number;
  }
  return number;
#endif
}

// The element types. Each has three constants that find elements that are not finite. kExponents masks the
// exponents in a 32-bit word. If kCarry is added to the masked word, the exponent of an infinity or a NaN
// overflows into a bit of kSigns. For float64, use the upper word, which holds the exponent.
struct Float16 {
  using Wide = float;
  static constexpr u32 kExponents = 0x7c007c00u, kCarry = 0x04000400u, kSigns = 0x80008000u;
  u16 bits;
  __device__ static Wide widen(Float16 x) { return half_to_float(x.bits); }
  __device__ static Float16 narrow(Wide x) { return {float_to_half(x)}; }
  __device__ static u32 narrow_two(Wide low, Wide high) {
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 800
    u32 word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
#else
    return narrow(low).bits | u32(narrow(high).bits) << 16;
#endif
  }
};

struct BFloat16 {
  using Wide = float;
  static constexpr u32 kExponents = 0x7f807f80u, kCarry = 0x00800080u, kSigns = 0x80008000u;
  u16 bits;
  __device__ static Wide widen(BFloat16 x) { return __uint_as_float(u32(x.bits) << 16); }
  __device__ static BFloat16 narrow(Wide x) {  // with integers: sm_75 has no instruction for it
    if (x != x) return {0x7fc0};
    const u32 word = __float_as_uint(x);
    return {u16((word + 0x7fffu + ((word >> 16) & 1u)) >> 16)};
  }
  // Gives the same results as narrow(), except for the bits of a NaN.
  __device__ static u32 narrow_two(Wide low, Wide high) {
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 800
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
#else
    return narrow(low).bits | u32(narrow(high).bits) << 16;
#endif
  }
};

struct Float32 {
  using Wide = float;
  static constexpr u32 kExponents = 0x7f800000u, kCarry = 0x00800000u, kSigns = 0x80000000u;
  float value;
  __device__ static Wide widen(Float32 x) { return x.value; }
  __device__ static Float32 narrow(Wide x) { return {x}; }
};

struct Float64 {
  using Wide = double;
  static constexpr u32 kExponents = 0x7ff00000u, kCarry = 0x00100000u, kSigns = 0x80000000u;
  double value;
  __device__ static Wide widen(Float64 x) { return x.value; }
  __device__ static Float64 narrow(Wide x) { return {x}; }
};

template <typename First, typename Second>
inline constexpr bool is_same = false;
template <typename T>
inline constexpr bool is_same<T, T> = true;

// `kCount` neighboring elements, which one memory access moves.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Packet {
  T element[kCount];
};

// Element `i` of a packet, converted to the wide type. Two bfloat16 in one word take one instruction each.
template <typename T, int kCount>
__device__ inline typename T::Wide widened(const Packet<T, kCount>& packet, int i) {
  if constexpr (is_same<T, BFloat16> && kCount % 2 == 0) {
    u32 words[kCount / 2];
    memcpy(words, &packet, sizeof(packet));
    return __uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000u);
  } else {
    return T::widen(packet.element[i]);
  }
}

// Returns a value of the built-in type that has as many bytes as the packet. One instruction loads or stores
// such a value.
template <typename P>
__device__ inline auto word_of(const P&) {
  if constexpr (sizeof(P) == 2) {
    return u16{};
  } else if constexpr (sizeof(P) == 4) {
    return u32{};
  } else if constexpr (sizeof(P) == 8) {
    return uint2{};
  } else {
    return uint4{};
  }
}

// Load and store packets in global memory. The compiler cannot know the memory space of an address that comes
// from a table; these instructions state it.
template <typename P>
__device__ inline P load_packet(const P* address) {
  P packet;
  using Word = decltype(word_of(packet));
  const Word word = __ldca(reinterpret_cast<const Word*>(address));
  memcpy(&packet, &word, sizeof(P));
  return packet;
}

template <typename P>
__device__ inline void store_packet(P* address, const P& packet) {
  auto word = word_of(packet);
  memcpy(&word, &packet, sizeof(P));
  __stwb(reinterpret_cast<decltype(word)*>(address), word);
}

// Rounds wide numbers to the elements of a packet.
template <typename T, int kCount>
__device__ inline Packet<T, kCount> narrowed(const typename T::Wide (&wide)[kCount]) {
  Packet<T, kCount> packet;
  if constexpr (sizeof(T) == 2 && kCount % 2 == 0) {
    u32 words[kCount / 2];
    for (int i = 0; i < kCount / 2; ++i) words[i] = T::narrow_two(wide[2 * i], wide[2 * i + 1]);
    memcpy(&packet, words, sizeof(packet));
  } else {
    for (int i = 0; i < kCount; ++i) packet.element[i] = T::narrow(wide[i]);
  }
  return packet;
}

// Returns nonzero if an element of the packet is not finite. It takes a few integer operations per 32 bits.
template <typename T, int kCount>
__device__ inline u32 non_finite_marks(const Packet<T, kCount>& packet) {
  constexpr int kWords = (sizeof(packet) + 3) / 4, kStep = sizeof(T) == 8 ? 2 : 1;
  u32 words[kWords] = {}, marks = 0;
  memcpy(words, &packet, sizeof(packet));
  for (int i = kStep - 1; i < kWords; i += kStep) marks |= (words[i] & T::kExponents) + T::kCarry;
  return marks & T::kSigns;
}

template <typename T>
inline constexpr int kPerVector = 16 / int(sizeof(T));

template <typename T>
using Vector = Packet<T, kPerVector<T>>;

constexpr u32 kHasInf = 1, kHasNan = 2;

// The bits that a number adds to the flags of its tensor.
template <typename Wide>
__device__ inline u32 non_finite_bits(Wide x) {
  if (is_finite(x)) return 0;
  return x != x ? kHasNan : kHasInf;
}

}  // namespace amp_plugin::cuda
