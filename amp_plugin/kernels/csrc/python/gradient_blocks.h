// The gradients of a list of parameters, a block at a time.
//
// From the list to a gradient lead four pointers, and thousands of parameters are in no near cache. So each
// pointer is followed for a whole block before the next one is: as many cache lines are on their way at once
// as the processor can wait for.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>

#include "binding.h"

namespace amp_plugin {

constexpr size_t kGradientBlock = 16;  // measured: 8 and 32 take longer

using GradientBlock = std::array<const at::Tensor*, kGradientBlock>;

inline void prefetch(const void* object, size_t offset) {
  __builtin_prefetch(static_cast<const char*>(object) + offset);
}

// Calls visit(begin, gradients, count) for each block in order, until it returns false; returns whether it
// never did. A gradient that is not there is an undefined tensor.
template <typename Visit>
bool visit_blocks(python::List params, const Visit& visit) {
  std::array<const c10::TensorImpl*, kGradientBlock> impls;
  GradientBlock grads;
  for (size_t begin = 0; begin < params.size(); begin += kGradientBlock) {
    const size_t left = params.size() - begin, count = std::min(left, kGradientBlock);
    for (size_t i = kGradientBlock; i < std::min(left, 2 * kGradientBlock); ++i)
      __builtin_prefetch(&python::tensor_of(params[begin + i]));
    for (size_t i = 0; i < count; ++i) {
      impls[i] = python::tensor_of(params[begin + i]).unsafeGetTensorImpl();
      prefetch(impls[i], 24);  // what autograd knows of it
    }
    for (size_t i = 0; i < count; ++i) prefetch(impls[i]->autograd_meta(), 40);  // the gradient
    for (size_t i = 0; i < count; ++i) {
      grads[i] = &impls[i]->grad();
      const c10::TensorImpl* grad = grads[i]->unsafeGetTensorImpl();
      prefetch(grad, 16);  // storage and version
      prefetch(grad, sizeof(c10::TensorImpl) - 32);  // size, dtype, device
      prefetch(grad, sizeof(c10::TensorImpl) - 1);
    }
    if (!visit(begin, grads, count)) return false;
  }
  return true;
}

// Calls visit(i, gradient) for each parameter in order, until it returns false; returns whether it never did.
template <typename Visit>
bool visit_gradients(python::List params, const Visit& visit) {
  return visit_blocks(params, [&](size_t begin, const GradientBlock& grads, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      if (!visit(begin + i, *grads[i])) return false;
    }
    return true;
  });
}

}  // namespace amp_plugin
