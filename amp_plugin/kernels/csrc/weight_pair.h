// A float32 weight as two halves of 16 bits: what the model computes with, and the rest.
#pragma once

#include <cstdint>

namespace amp_plugin {

// A float32 as bf16 bits and what is missing from them, as a signed number of units in float32's last place.
struct WeightPair {
  uint16_t high;
  int16_t low;
};

// Round to nearest, ties away from zero: unlike ties to even, it is reversible. A NaN whose high half would
// not be a NaN (its payload is in the low bits, or rounds up) becomes the quiet NaN of its sign.
inline WeightPair pack_weight(uint32_t bits) {
  const uint32_t sign = bits & 0x80000000U;
  const uint32_t magnitude = bits & 0x7FFFFFFFU;
  const bool lost_nan = (magnitude > 0x7F800000U && magnitude < 0x7F808000U) || magnitude >= 0x7FFF8000U;
  const uint32_t kept = lost_nan ? (sign | 0x7FC00000U) : bits;
  const uint32_t high = (kept + 0x8000U) >> 16;
  return {static_cast<uint16_t>(high), static_cast<int16_t>(kept - (high << 16))};
}

// Beside a zero a low half counts for nothing: whoever writes a weight does not know of it, and a negative
// one would make a NaN. So float32 numbers below 4.6e-41 come back as zeros.
inline uint32_t unpack_weight(uint16_t high, int16_t low) {
  const uint32_t rest = (high & 0x7FFFU) == 0 ? 0U : static_cast<uint32_t>(static_cast<int32_t>(low));
  return (static_cast<uint32_t>(high) << 16) + rest;
}

}  // namespace amp_plugin
