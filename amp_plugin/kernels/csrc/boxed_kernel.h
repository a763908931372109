// Plain functions as kernels of ops that only Python calls: such a call brings its arguments on a stack.
//
// Of each function registered by its type torch's headers make a second kernel for calls from C++, a check of
// its schema and their parts: a quarter of a second of compiling each.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace amp_plugin {

// An argument on the stack, read as the type of the parameter that it is given to. Lists live as long.
class StackArgument {
 public:
  explicit StackArgument(c10::IValue& value) : value_(value) {}

  operator int64_t() const { return value_.toInt(); }
  operator double() const { return value_.toDouble(); }
  operator bool() const { return value_.toBool(); }
  operator std::string_view() const { return value_.toStringView(); }
  operator const at::Tensor&() const { return value_.toTensor(); }
  operator const std::optional<at::Tensor>&() {
    if (value_.isTensor()) optional_ = value_.toTensor();
    return optional_;
  }
  operator at::TensorList() { return tensors_ = value_.toTensorVector(); }
  operator at::IntArrayRef() { return integers_ = value_.toIntVector(); }
  operator std::vector<std::string>() const {
    std::vector<std::string> texts;
    for (const c10::IValue& text : value_.toListRef()) texts.push_back(text.toStringRef());
    return texts;
  }

 private:
  c10::IValue& value_;
  std::optional<at::Tensor> optional_;
  std::vector<at::Tensor> tensors_;
  std::vector<int64_t> integers_;
};

inline void push(torch::jit::Stack& stack, c10::IValue result) { stack.push_back(std::move(result)); }

template <typename... Results>
void push(torch::jit::Stack& stack, std::tuple<Results...> results) {
  std::apply([&](auto&... result) { (stack.emplace_back(std::move(result)), ...); }, results);
}

template <auto function>
struct BoxedKernel;

template <typename Result, typename... Parameters, Result (*function)(Parameters...)>
struct BoxedKernel<function> {
  static void call(const c10::OperatorHandle& /*op*/, torch::jit::Stack* stack) {
    call(*stack, std::index_sequence_for<Parameters...>());
  }

 private:
  template <size_t... i>
  static void call(torch::jit::Stack& stack, std::index_sequence<i...> /*positions*/) {
    c10::IValue* first = stack.data() + stack.size() - sizeof...(Parameters);
    if constexpr (std::is_void_v<Result>) {
      function(StackArgument(first[i])...);
      stack.resize(stack.size() - sizeof...(Parameters));
    } else {
      Result result = function(StackArgument(first[i])...);
      stack.resize(stack.size() - sizeof...(Parameters));
      push(stack, std::move(result));
    }
  }
};

// The kernel of a function, for `library.def` and `library.impl`.
template <auto function>
torch::CppFunction boxed() {
  return torch::CppFunction::makeFromBoxedFunction<&BoxedKernel<function>::call>();
}

}  // namespace amp_plugin
