// What launches hand to kernels. g++ and NVRTC both read this file, so it includes nothing.
#pragma once

namespace amp_plugin::cuda {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

enum DType : u8 { kFloat16, kBFloat16, kFloat32, kFloat64, kComplex64, kComplex128 };

enum StateType : u8 { kStateFloat32, kStateBFloat16, kStateCodes };  // as State in step_rows.h

constexpr u32 kCodeBlock = 128;  // elements with a unit of their own, and then the unit
constexpr u32 kCodeBlockBytes = 132;

constexpr u32 kThreads = 256;  // of a block that works on a table
constexpr u32 kGranuleBytes = 4096;
constexpr u32 kGranuleElements = 1024;  // of an op that walks through several tensors at once

struct alignas(16) Row {
  u64 address;
  u64 out_address;  // of what else belongs to the tensor; 0 where nothing does
  u64 numel;
  u32 first_granule;  // ascending; an empty tensor shares its successor's
  u8 dtype;
  u8 out_dtype;
  u16 unused;
};
static_assert(sizeof(Row) == 32);

// What one block found.
struct alignas(16) Partial {
  double total;
  u32 bits;
  u32 unused;
};

struct Table {
  const Row* rows;
  u32* marks;  // one for each tensor, 0 before and after each launch
  Partial* partials;  // one for each block
  u32* ticket;  // 0 before and after each launch
  u32 count;  // of tensors; a step has several rows for each
  u32 granules;
};

// A one-element tensor, fp32 or fp64, that stays on the device; what is read may be 1 divided by it. No
// address where there is no number.
struct DeviceScalar {
  const void* address;
  u32 is_double;
  u32 is_inverted;
};

// Where the results of a measurement go.
struct Results {
  float* norm;
  float* found_inf;
  u8* flags;  // one for each tensor
};

struct AdamOptions {
  double lr, beta1, beta2, eps, weight_decay;
  u32 decoupled, maximize, amsgrad, unused;
};

struct SgdOptions {
  double lr, momentum, dampening, weight_decay;
  u32 nesterov, maximize, first_step, unused;
};

constexpr u32 kMostPacked = 32;  // measurements, flags and powers of one launch

struct Measurements {
  DeviceScalar norms[kMostPacked];
  DeviceScalar flags[kMostPacked];
  double replicas[kMostPacked];  // of each power
  u8 slots[kMostPacked];  // of each norm
  u32 norm_count;
  u32 flag_count;
  u32 power_count;
};

struct Packed {
  const double* values[kMostPacked];
  u32 power_counts[kMostPacked];
  u32 count;
};

}  // namespace amp_plugin::cuda
