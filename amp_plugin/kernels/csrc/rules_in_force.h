// Which op rules are in force in this thread. They are stored where torch's compilers look.
//
// Why: torch.compile guards on torch's autocast state, the keys of its caches contain that state, and
// autograd's threads inherit it. None of them would see a state of our own, and a graph that was compiled
// under other rules must not run. So the rules in force are written into torch's state: into the autocast
// dtypes of three device types that have no tensors in any build of torch.
//
//   device   what its autocast state says
//   IPU      enabled: one of our regions is open and enabled. dtype: see "Compiled code" below.
//   MAIA     dtype: the low digit of a code. enabled: the code is not 0.
//   MTIA     dtype: the high digit of the code. enabled: the code is not 0.
//
// The code. A process numbers its rule sets; the default rules are number 0. One set can be in force for the
// CPU and one for an accelerator. That pair is one number, the code:
//
//   code                                          CPU           accelerator
//   0 ... kMaxRuleSets - 1                        code          0
//   kMaxRuleSets ... 2 * kMaxRuleSets - 1         0             code - kMaxRuleSets
//   from 2 * kMaxRuleSets on                      c / kTogether    c % kTogether, c = code - 2 * kMaxRuleSets
//
// In the last row, both numbers are below kTogether.
//
// The digits. A digit is a dtype, and kBase is the number of dtypes. Digits are counted from the dtype that a
// fresh thread has, so a thread that never opened a region has the code 0. The low digit is 0 only in the
// code 0. One look at it therefore tells whether the default rules are in force. The enabled flags are set
// because torch compares a device's dtype only if its autocast is enabled.
//
// Compiled code. A compiled graph can be used in another process, which may number its rule sets differently.
// So a region in compiled code (casting/compiled.py) is traced as torch.autocast blocks on IPU, MAIA, MTIA
// and the region's device, and one op inside them, amp_plugin::use_rules. The op names the rules by their
// content. When it runs, it looks up their number and calls `show_rules`. The blocks restore the previous
// state. The dtype bfloat16 on IPU says that these blocks are open. Tracers may call the op without having
// opened them, and then it does nothing. The cache keys contain digits. What the digits mean in this process
// is part of the tag that torch adds to its cache keys (`tag_compile_caches` in
// casting/installed_kernels.py).
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

namespace amp_plugin {

// The number of distinct rule sets that a process may use. The default set, number 0, is one of them.
constexpr int kMaxRuleSets = 585;

constexpr c10::DeviceType kMarker = c10::DeviceType::IPU;
constexpr c10::DeviceType kLowDigit = c10::DeviceType::MAIA;
constexpr c10::DeviceType kHighDigit = c10::DeviceType::MTIA;

// The dtype that represents the digit 0.
constexpr c10::ScalarType zero_of(c10::DeviceType digit) {
  return digit == kLowDigit ? c10::kBFloat16 : c10::kHalf;
}

// Whether this thread is in one of our regions that is enabled, or has inherited one.
bool is_marked();
void set_marked(bool marked);

// Get and set this thread's code.
int shown_code();
void show_code(int code);

// Returns the code after a change of the rules of one device. Throws if the two rule sets cannot be in force
// together.
int code_with(int code, c10::DeviceType device, int rules);

// The number of the rule set in force for a device, according to this thread's code.
int shown_rules(c10::DeviceType device);

// Puts a rule set in force for a device, from now on.
void show_rules(c10::DeviceType device, int rules);

}  // namespace amp_plugin
