// The gradients of a list of parameters, a block at a time.
//
// From the list to a gradient lead four pointers, and thousands of parameters are in no near cache. So each
// pointer is followed for a whole block before the next one is: as many cache lines are on their way at once
// as the processor can wait for.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>

#include "../autograd_node.h"
#include "binding.h"

namespace amp_plugin {

constexpr size_t kGradientBlock = 16;  // measured: 8 and 32 take longer

using GradientBlock = std::array<const at::Tensor*, kGradientBlock>;

// Calls visit(begin, gradients, count) for each block in order, until it returns false; returns whether it
// never did. A gradient that is not there is an undefined tensor.
template <typename Visit>
bool visit_blocks(python::List params, const Visit& visit) {
  std::array<const c10::TensorImpl*, kGradientBlock> impls;
  GradientBlock grads;
  python::ExpectTensors tensors;
  for (size_t begin = 0; begin < params.size(); begin += kGradientBlock) {
    const size_t left = params.size() - begin, count = std::min(left, kGradientBlock);
    for (size_t i = kGradientBlock; i < std::min(left, 2 * kGradientBlock); ++i)
      __builtin_prefetch(&python::tensor_of(params[begin + i]));
    for (size_t i = 0; i < count; ++i) {
      tensors.expect(params[begin + i]);
      impls[i] = python::tensor_of(params[begin + i]).unsafeGetTensorImpl();
      __builtin_prefetch(reinterpret_cast<const char*>(impls[i]) + 24);  // what autograd knows of it
    }
    find_gradients(impls.data(), count, grads.data());
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
