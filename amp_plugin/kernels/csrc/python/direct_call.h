// What it takes to call an op on tensors from Python without the way through its Python bindings.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace amp_plugin {

// Whether a kernel may take the tensor as it is: strided memory, no wrapper and no lazy bit around it.
inline bool is_plain(const at::Tensor& tensor) {
  using c10::DispatchKey;
  static const c10::DispatchKeySet special(
      {DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::Conjugate, DispatchKey::Negative,
       DispatchKey::ZeroTensor, DispatchKey::Functionalize, DispatchKey::FuncTorchGradWrapper,
       DispatchKey::FuncTorchBatched});
  return tensor.layout() == at::kStrided && !tensor.is_nested() && !tensor.key_set().has_any(special);
}

template <typename Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace amp_plugin
