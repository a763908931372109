#include "region.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <utility>

#include "region_casts.h"
#include "torch_autocast.h"

namespace amp_plugin {
namespace {

// The autocast state of device types that have no tensors here travels with torch's own: into
// autograd's threads, into Dynamo's guards and into the compile caches. One flag says "this is our
// region". The dtypes of two others are the digits of a code, which says whose rules are in force on
// the CPU and on the accelerator; their flags are on where it is not 0, since torch compares a dtype only
// then.
constexpr c10::DeviceType kMarker = c10::DeviceType::IPU;
constexpr c10::DispatchKey kMarkerKey = c10::DispatchKey::AutocastIPU;
constexpr c10::DeviceType kLow = c10::DeviceType::MAIA;  // its digit is 0 only in the code 0
constexpr c10::DeviceType kHigh = c10::DeviceType::MTIA;
constexpr int kBase = static_cast<int>(c10::ScalarType::Float4_e2m1fn_x2) + 1;

// In a fresh thread both digits are 0.
constexpr int zero_of(c10::DeviceType slot) {
  return static_cast<int>(slot == kLow ? c10::kBFloat16 : c10::kHalf);
}

int digit(c10::DeviceType slot) {
  return (static_cast<int>(at::autocast::get_autocast_dtype(slot)) - zero_of(slot) + kBase) % kBase;
}

void set_digit(c10::DeviceType slot, int digit, bool is_shown) {
  at::autocast::set_autocast_enabled(slot, is_shown);
  at::autocast::set_autocast_dtype(slot, static_cast<c10::ScalarType>((digit + zero_of(slot)) % kBase));
}

int shown_code() {
  const int low = digit(kLow);
  return low == 0 ? 0 : low + digit(kHigh) * (kBase - 1);
}

void show_code(int code) {
  set_digit(kLow, code == 0 ? 0 : 1 + (code - 1) % (kBase - 1), code != 0);
  set_digit(kHigh, code == 0 ? 0 : (code - 1) / (kBase - 1), code != 0);
}

// Of one kind of device alone every rule set has a code; of two at a time, the first ones.
constexpr int kTogether = 30;
static_assert(2 * kMaxRuleSets + kTogether * kTogether <= (kBase - 1) * kBase);

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
        cpu < kTogether && accelerator < kTogether, "Of a process's rule sets the first ", kTogether - 1,
        " can be in force on the CPU and on an accelerator at the same time. Open the regions of several "
        "rule sets one after the other.");
    return 2 * kMaxRuleSets + cpu * kTogether + accelerator;
  }
};

int rules_in_force(c10::DeviceType device) { return RulesInForce::of(shown_code()).on(device); }

thread_local std::vector<Region> open_regions;

// Whether torch's cache, which all threads share, may hold casts that an op of this thread has put there.
thread_local bool uses_torch_cache = false;

// Zero-initialised, so a rule set's number is stored plus one.
std::array<std::atomic<int>, 64> default_rules_plus_one;

bool marked() { return !c10::impl::tls_local_dispatch_key_set().excluded_.has(kMarkerKey); }

int current_nesting() {
  const int inside = at::autocast::increment_nesting();
  at::autocast::decrement_nesting();
  return inside - 1;
}

const Region* innermost(c10::DeviceType device) {
  for (auto region = open_regions.rbegin(); region != open_regions.rend(); ++region) {
    if (region->device == device) return &*region;
  }
  return nullptr;
}

int default_rules_of(c10::DeviceType device) {
  return default_rules_plus_one[static_cast<size_t>(device)].load(std::memory_order_acquire) - 1;
}

// In a backward pass the block is a checkpoint's, which recomputes with the casts shared as torch does.
Plan by_default_rules(c10::DeviceType device, bool in_backward) {
  uses_torch_cache = true;
  const int rules = default_rules_of(device);
  if (rules == kNoRules) return {Course::kTorchKernel, rules, nullptr, false};
  return {Course::kFollowRules, rules, nullptr, in_backward && at::autocast::is_autocast_cache_enabled()};
}

}  // namespace

void enter_region(const void* owner, RegionOptions options) {
  const int previous_code = shown_code();
  auto in_force = RulesInForce::of(previous_code);
  in_force.on(options.device) = options.rules;
  const int code = in_force.code();  // throws before anything is changed
  Region region{
      .owner = owner,
      .device = options.device,
      .rules = options.rules,
      .nesting = 0,
      .graph_task = torch::autograd::get_current_graph_task_id(),
      .cache_enabled = options.cache_enabled,
      .previous_enabled = at::autocast::is_autocast_enabled(options.device),
      .previous_dtype = at::autocast::get_autocast_dtype(options.device),
      .previous_cache_enabled = at::autocast::is_autocast_cache_enabled(),
      .previous_marker = marked(),
      .previous_code = previous_code,
  };
  at::autocast::set_autocast_enabled(options.device, options.enabled);
  at::autocast::set_autocast_dtype(options.device, options.dtype);
  at::autocast::set_autocast_enabled(kMarker, options.enabled);
  // A reentrant checkpoint recomputes with the flag it found. With torch's cache on, make_graphed_callables
  // refuses to capture.
  const bool shows_cache = options.cache_enabled && options.device == c10::DeviceType::CPU;
  at::autocast::set_autocast_cache_enabled(shows_cache);
  region.nesting = at::autocast::increment_nesting();
  open_regions.push_back(std::move(region));
  if (code != previous_code) show_code(code);
}

bool exit_region(const void* owner) {
  auto& open = open_regions;
  for (size_t i = open.size(); i-- > 0;) {
    if (open[i].owner != owner) continue;
    const Region region = std::move(open[i]);
    open.erase(open.begin() + static_cast<std::ptrdiff_t>(i));
    if (at::autocast::decrement_nesting() == 0 && std::exchange(uses_torch_cache, false)) {
      at::autocast::clear_cache();
    }
    if (open.empty()) clear_region_casts();
    at::autocast::set_autocast_enabled(region.device, region.previous_enabled);
    at::autocast::set_autocast_dtype(region.device, region.previous_dtype);
    at::autocast::set_autocast_cache_enabled(region.previous_cache_enabled);
    at::autocast::set_autocast_enabled(kMarker, region.previous_marker);
    if (shown_code() != region.previous_code) show_code(region.previous_code);
    return true;
  }
  return false;
}

Plan plan_for(c10::DeviceType device) {
  const Region* region = innermost(device);
  const int graph_task = torch::autograd::get_current_graph_task_id();
  if (region != nullptr) {
    // Opened outside the backward pass that runs now, it is followed only in a torch.autocast block opened
    // inside that (checkpoint's recomputation).
    if (region->graph_task == graph_task || current_nesting() > open_regions.back().nesting) {
      return {Course::kFollowRules, rules_in_force(device), region, false};
    }
    return {Course::kLeaveAsIs, kNoRules, nullptr, false};
  }
  // A thread of autograd's inherits the state of a region it did not open.
  const bool inherited = open_regions.empty() && marked() && graph_task != -1;
  if (inherited && current_nesting() == 0) return {Course::kLeaveAsIs, kNoRules, nullptr, false};
  // Opened inside compiled code, a region is torch's blocks and what `show_rules` has said in them.
  const int shown = rules_in_force(device);
  if (shown > 0 && shown != default_rules_of(device)) {
    uses_torch_cache = true;
    return {Course::kFollowRules, shown, nullptr, at::autocast::is_autocast_cache_enabled()};
  }
  return by_default_rules(device, graph_task != -1);
}

void show_rules(c10::DeviceType device, int rules) {
  auto in_force = RulesInForce::of(shown_code());
  in_force.on(device) = std::max(rules, 0);
  show_code(in_force.code());
}

void set_default_rules(c10::DeviceType device, int rules) {
  default_rules_plus_one[static_cast<size_t>(device)].store(rules + 1, std::memory_order_release);
  if (open_regions.empty()) return show_rules(device, rules);
  auto in_force = RulesInForce::of(open_regions.front().previous_code);  // regions that are open keep theirs
  in_force.on(device) = std::max(rules, 0);
  open_regions.front().previous_code = in_force.code();
}

std::vector<int64_t> innermost_regions() {
  std::vector<int64_t> triples;
  for (const auto& region : open_regions) {
    if (innermost(region.device) == &region) {
      triples.insert(
          triples.end(), {static_cast<int64_t>(region.device), region.rules, region.cache_enabled});
    }
  }
  return triples;
}

namespace {

// Whoever keeps a cast holds a weak reference to the weight's storage; few others do.
bool may_be_kept(const at::Tensor& tensor) {
  if (!tensor.has_storage()) return false;
  constexpr uint32_t alive_and_this_one = 2;
  return tensor.storage().getWeakStorageImpl().weak_use_count() > alive_and_this_one;
}

}  // namespace

void note_write(const at::Tensor& tensor) {
  if (!open_regions.empty() && may_be_kept(tensor)) forget_casts_of_storage(tensor);
}

}  // namespace amp_plugin
