// Which op rules are in force in this thread, written where torch's compilers look.
//
// Why. torch.compile guards on torch's autocast state, its caches are keyed with it, and autograd's threads
// inherit it. None of them sees a state of our own, and a graph that was compiled under other rules must not
// run. So the rules in force are written into torch's state: into the autocast dtypes of two device types
// that have no tensors in any build of torch.
//
//   device   what its autocast state says
//   IPU      enabled: a region of ours is open and is on. dtype: see "Compiled code" below.
//   MAIA     dtype: the low digit of a code. enabled: the code is not 0.
//   MTIA     dtype: the high digit of the code. enabled: the code is not 0.
//
// The code. A process numbers its rule sets; the default rules are number 0. One set can be in force for the
// CPU and one for an accelerator. That pair is one number, the code:
//
//   code                                          CPU           accelerator
//   0 ... kMaxRuleSets - 1                        code          0
//   kMaxRuleSets ... 2 * kMaxRuleSets - 1         0             code - kMaxRuleSets
//   from 2 * kMaxRuleSets on                      both are below kTogether: first * kTogether + second
//
// The digits. A digit is a dtype: there are kBase of them. They are counted from the dtype that a fresh
// thread has, so a thread that never opened a region shows the code 0. The low digit is 0 only in the
// code 0: one look at it tells whether any rules but the default ones are in force. The flags are on
// because torch compares a device's dtype only where its autocast is on.
//
// Compiled code. A graph is used in other processes, which number their rule sets in another order. So a
// region in compiled code (casting/compiled.py) is traced as torch's own blocks on IPU, MAIA, MTIA and the
// region's device, and one op in them that names the rules by their content, amp_plugin::use_rules. The op
// looks the number up and calls `show_rules`. The blocks put the previous state back. The dtype bfloat16 on
// IPU says that these blocks are open: tracers may call the op without having opened them, and then it does
// nothing. Cache keys hold digits; what they mean in this process is in torch's own tag of the caches
// (`tag_compile_caches` in casting/installed_kernels.py).
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

namespace amp_plugin {

// Number of distinct rule sets a process may use, the default one, 0, among them.
constexpr int kMaxRuleSets = 585;

constexpr c10::DeviceType kMarker = c10::DeviceType::IPU;
constexpr c10::DeviceType kLowDigit = c10::DeviceType::MAIA;
constexpr c10::DeviceType kHighDigit = c10::DeviceType::MTIA;

// The dtype that stands for the digit 0.
constexpr c10::ScalarType zero_of(c10::DeviceType digit) {
  return digit == kLowDigit ? c10::kBFloat16 : c10::kHalf;
}

// Whether this thread is in a region of ours that is on, or in one that it inherited.
bool is_marked();
void set_marked(bool marked);

// The code that is shown in this thread, and how to show another.
int shown_code();
void show_code(int code);

// The code with other rules on one device. Throws if the two cannot be in force together.
int code_with(int code, c10::DeviceType device, int rules);

// The number of the rules that are shown for a device.
int shown_rules(c10::DeviceType device);

// Shows whose rules are in force on a device from now on.
void show_rules(c10::DeviceType device, int rules);

}  // namespace amp_plugin
