// What the states of a rule hold.
#pragma once

namespace amp_plugin::rules {

// How a state is rounded where it is stored in fewer bits.
enum StateKind : unsigned char {
  kSigned,  // to nearest
  kSquare,  // not negative: up or down at random, or it would stand still
  kSecondSquare,  // likewise, with other draws
  kWeight,  // always in float32
};

constexpr bool is_square(StateKind kind) { return kind == kSquare || kind == kSecondSquare; }

template <bool condition, typename First, typename Second>
struct SelectType {
  using Type = First;
};
template <typename First, typename Second>
struct SelectType<false, First, Second> {
  using Type = Second;
};
template <bool condition, typename First, typename Second>
using Select = typename SelectType<condition, First, Second>::Type;

template <StateKind... kinds>
struct StateList {
  static constexpr unsigned kCount = sizeof...(kinds);
  static constexpr StateKind kind(unsigned i) {
    constexpr StateKind all[] = {kinds..., kWeight};
    return all[i];
  }
};

}  // namespace amp_plugin::rules
