// Float32 weights and the two 16-bit halves that they are stored as.
#pragma once

#include "tensor_memory.h"

namespace amp_plugin {

// Raises ValueError unless the tensor has this dtype, and the shape and device of its weight.
inline void check_weight(
    const at::Tensor& tensor, const at::Tensor& like, at::ScalarType dtype, const char* op,
    const char* name) {
  TORCH_CHECK_VALUE(
      tensor.scalar_type() == dtype && tensor.sizes() == like.sizes() && tensor.device() == like.device(), op,
      ": ", name, " must be ", dtype, " of the shape of its weight, ", like.sizes(), ", on ", like.device(),
      "; got ", tensor.scalar_type(), " of shape ", tensor.sizes(), " on ", tensor.device(), ".");
}

inline void check_count(const char* op, size_t masters, size_t other, const char* name) {
  TORCH_CHECK_VALUE(
      masters == other, op, ": ", masters, " masters and ", other, " ", name, "; give one for each master.");
}

// The tensors of pack_weights_ and unpack_weights_. The constructor checks them, and brings each pair into
// the memory order of its master.
struct StoredWeights {
  StoredWeights(const char* op, at::TensorList masters, at::TensorList high, at::TensorList low)
      : masters(checked(op, masters, high, low)),
        high(high, this->masters.tensors()),
        low(low, this->masters.tensors()) {}

  Dense masters;
  Dense high;
  Dense low;

 private:
  static at::TensorList checked(
      const char* op, at::TensorList masters, at::TensorList high, at::TensorList low) {
    check_count(op, masters.size(), high.size(), "high halves");
    check_count(op, masters.size(), low.size(), "low halves");
    for (size_t i = 0; i < masters.size(); ++i) {
      check_weight(masters[i], high[i], at::kFloat, op, "a master");
      check_weight(high[i], masters[i], at::kBFloat16, op, "a high half");
      check_weight(low[i], high[i], at::kShort, op, "a low half");
    }
    return masters;
  }
};

}  // namespace amp_plugin
