// The kinds of states that a rule can have.
#pragma once

namespace amp_plugin::rules {

// How a state is rounded if it is stored in fewer than 32 bits.
enum StateKind : unsigned char {
  kSigned,  // to the nearest value
  kSquare,  // never negative; up or down at random, because rounding to nearest would never change it
  kSecondSquare,  // the same, with other random bits
  kWeight,  // not rounded: always stored as float32
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
