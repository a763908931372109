#include "region.h"

#include <array>
#include <atomic>
#include <utility>
#include <vector>

#include "region_casts.h"
#include "rules_in_force.h"
#include "torch_autocast.h"

namespace amp_plugin {
namespace {

thread_local std::vector<Region> open_regions;

// True if an op of this thread may have put a cast into torch's cache, which all threads share.
thread_local bool uses_torch_cache = false;

// Zero means no rules, because statics are zero-initialized. So the number of the rule set is stored plus
// one.
std::array<std::atomic<int>, 64> default_rules_plus_one;

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

// In a torch.autocast block, torch's own cache keeps the casts.
Plan plan_in_torch_block(Course course, int rules) {
  uses_torch_cache = true;
  const bool keeps = at::autocast::is_autocast_cache_enabled();
  return {course, rules, keeps ? Keeper::kTorch : Keeper::kNobody};
}

// A region on the CPU copies its cache flag to torch's flag. There torch.autocast blocks and tracers inside
// the region can change it, so torch's flag counts. A region on an accelerator turns torch's flag off, and
// only its own flag counts.
Keeper keeper_in(const Region& region) {
  const bool shows_flag = open_regions.back().device == c10::DeviceType::CPU;
  const bool keeps = shows_flag ? at::autocast::is_autocast_cache_enabled() : region.cache_enabled;
  return keeps ? Keeper::kRegion : Keeper::kNobody;
}

constexpr Plan leave_as_is{Course::kLeaveAsIs, kNoRules, Keeper::kNobody};

}  // namespace

Region enter_region(RegionOptions options) {
  const int previous_code = shown_code();
  // throws before anything has changed
  const int code = code_with(previous_code, options.device, options.rules);
  Region region{
      .device = options.device,
      .nesting = 0,
      .graph_task = torch::autograd::get_current_graph_task_id(),
      .cache_enabled = options.cache_enabled,
      .previous_enabled = at::autocast::is_autocast_enabled(options.device),
      .previous_dtype = at::autocast::get_autocast_dtype(options.device),
      .previous_cache_enabled = at::autocast::is_autocast_cache_enabled(),
      .previous_marker = is_marked(),
      .previous_code = previous_code,
  };
  at::autocast::set_autocast_enabled(options.device, options.enabled);
  at::autocast::set_autocast_dtype(options.device, options.dtype);
  set_marked(options.enabled);
  // A reentrant checkpoint recomputes with the cache flag that it finds here. But make_graphed_callables
  // refuses to capture if torch's cache is on, so the flag is shown only on the CPU.
  const bool shows_cache = options.cache_enabled && options.device == c10::DeviceType::CPU;
  at::autocast::set_autocast_cache_enabled(shows_cache);
  region.nesting = at::autocast::increment_nesting();
  open_regions.push_back(region);
  if (code != previous_code) show_code(code);
  return region;
}

void exit_region(size_t from_innermost) {
  auto& open = open_regions;
  const auto place = open.end() - 1 - static_cast<std::ptrdiff_t>(from_innermost);
  const Region region = *place;
  open.erase(place);
  if (at::autocast::decrement_nesting() == 0 && std::exchange(uses_torch_cache, false)) {
    at::autocast::clear_cache();
  }
  if (open.empty()) clear_region_casts();
  at::autocast::set_autocast_enabled(region.device, region.previous_enabled);
  at::autocast::set_autocast_dtype(region.device, region.previous_dtype);
  at::autocast::set_autocast_cache_enabled(region.previous_cache_enabled);
  set_marked(region.previous_marker);
  if (shown_code() != region.previous_code) show_code(region.previous_code);
}

Plan plan_for(c10::DeviceType device) {
  const Region* region = innermost(device);
  const int graph_task = torch::autograd::get_current_graph_task_id();
  if (region != nullptr) {
    // The region was opened outside the backward pass that is running. Its rules are then followed only in a
    // torch.autocast block that was opened inside the backward pass, as a checkpoint's recomputation does.
    const bool is_followed =
        region->graph_task == graph_task || current_nesting() > open_regions.back().nesting;
    return is_followed ? Plan{Course::kFollowRules, shown_rules(device), keeper_in(*region)} : leave_as_is;
  }
  // Autograd's threads inherit the state of a region that they did not open.
  const bool inherited = open_regions.empty() && is_marked() && graph_task != -1;
  if (inherited && current_nesting() == 0) return leave_as_is;
  // A region in compiled code consists of torch.autocast blocks and the rules that `show_rules` has set
  // inside them.
  const int shown = shown_rules(device), by_default = default_rules_of(device);
  if (shown > 0 && shown != by_default) return plan_in_torch_block(Course::kFollowRules, shown);
  const auto course = by_default == kNoRules ? Course::kTorchKernel : Course::kFollowRules;
  return plan_in_torch_block(course, by_default);
}

void set_default_rules(c10::DeviceType device, int rules) {
  const bool is_open = !open_regions.empty();  // open regions keep their rules
  const int before = is_open ? open_regions.front().previous_code : shown_code();
  const int code = code_with(before, device, rules);  // throws before anything has changed
  default_rules_plus_one[static_cast<size_t>(device)].store(rules + 1, std::memory_order_release);
  if (is_open) {
    open_regions.front().previous_code = code;
  } else {
    show_code(code);
  }
}

}  // namespace amp_plugin
