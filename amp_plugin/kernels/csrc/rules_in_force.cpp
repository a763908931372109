#include "rules_in_force.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "torch_autocast.h"

namespace amp_plugin {
namespace {

constexpr int kBase = static_cast<int>(c10::ScalarType::Float4_e2m1fn_x2) + 1;

// If only one of the two devices has its own rules, any rule set has a code. If both have, only rule sets
// below this number do.
constexpr int kTogether = 30;
static_assert(2 * kMaxRuleSets + kTogether * kTogether <= (kBase - 1) * kBase);

int shown_digit(c10::DeviceType slot) {
  const int dtype = static_cast<int>(at::autocast::get_autocast_dtype(slot));
  return (dtype - static_cast<int>(zero_of(slot)) + kBase) % kBase;
}

void show_digit(c10::DeviceType slot, int digit, bool is_shown) {
  at::autocast::set_autocast_enabled(slot, is_shown);
  const int dtype = (digit + static_cast<int>(zero_of(slot))) % kBase;
  at::autocast::set_autocast_dtype(slot, static_cast<c10::ScalarType>(dtype));
}

struct RulesInForce {
  int cpu, accelerator;

  static RulesInForce of(int code) {
    if (code < kMaxRuleSets) return {code, 0};
    if (code < 2 * kMaxRuleSets) return {0, code - kMaxRuleSets};
    const int both = code - 2 * kMaxRuleSets;
    return {both / kTogether, both % kTogether};
  }

  int& on(c10::DeviceType device) { return device == c10::DeviceType::CPU ? cpu : accelerator; }

  int code() const {
    if (accelerator == 0) return cpu;
    if (cpu == 0) return kMaxRuleSets + accelerator;
    TORCH_CHECK(
        cpu < kTogether && accelerator < kTogether, "Only the first ", kTogether - 1,
        " rule sets of a process can be in force on the CPU and on an accelerator at the same time. Close "
        "the region on one device before you open the region on the other.");
    return 2 * kMaxRuleSets + cpu * kTogether + accelerator;
  }
};

}  // namespace

bool is_marked() {
  return !c10::impl::tls_local_dispatch_key_set().excluded_.has(c10::DispatchKey::AutocastIPU);
}

void set_marked(bool marked) { at::autocast::set_autocast_enabled(kMarker, marked); }

int shown_code() {
  const int low = shown_digit(kLowDigit);
  return low == 0 ? 0 : low + shown_digit(kHighDigit) * (kBase - 1);
}

void show_code(int code) {
  show_digit(kLowDigit, code == 0 ? 0 : 1 + (code - 1) % (kBase - 1), code != 0);
  show_digit(kHighDigit, code == 0 ? 0 : (code - 1) / (kBase - 1), code != 0);
}

int code_with(int code, c10::DeviceType device, int rules) {
  auto in_force = RulesInForce::of(code);
  in_force.on(device) = std::max(rules, 0);
  return in_force.code();
}

int shown_rules(c10::DeviceType device) { return RulesInForce::of(shown_code()).on(device); }

void show_rules(c10::DeviceType device, int rules) { show_code(code_with(shown_code(), device, rules)); }

}  // namespace amp_plugin
