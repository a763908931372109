// Calls our ops through the dispatcher.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <type_traits>

namespace amp_plugin {

// Calls the op with this name. Its signature must be that of `function`. The op is looked up once.
template <auto function, typename Result, typename... Parameters>
Result call_op_as(
    Result (*)(Parameters...), const char* name, const std::type_identity_t<Parameters>&... arguments) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Result(Parameters...)>();
  return op.call(arguments...);
}

template <auto function, typename... Arguments>
auto call_op(const char* name, const Arguments&... arguments) {
  return call_op_as<function>(function, name, arguments...);
}

}  // namespace amp_plugin
