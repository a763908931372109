// Calls our ops through the dispatcher.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <type_traits>

namespace amp_plugin {

// Calls the op with this name. Its signature must be that of `function`. The op is looked up once.
template <auto function, typename... Arguments>
auto call_op(const char* name, const Arguments&... arguments) {
  using Signature = std::remove_pointer_t<decltype(function)>;
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
  return op.call(arguments...);
}

}  // namespace amp_plugin
