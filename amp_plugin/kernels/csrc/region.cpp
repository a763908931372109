#include "region.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <array>
#include <atomic>
#include <utility>

#include "region_casts.h"
#include "torch_autocast.h"

namespace amp_plugin {
namespace {

// The autocast state of device types that have no tensors here travels with torch's own: into
// autograd's threads, into Dynamo's guards and into the compile caches. One flag says "this is our
// region"; two others say "rules unlike torch's" for the CPU and for the accelerator, and their
// dtypes say which.
constexpr c10::DeviceType kMarker = c10::DeviceType::IPU;
constexpr c10::DispatchKey kMarkerKey = c10::DispatchKey::AutocastIPU;
constexpr std::array kRulesSlots = {c10::DeviceType::MAIA, c10::DeviceType::MTIA};

// Rule set n is kDtypes[n - 1] in a slot.
constexpr std::array<c10::ScalarType, kMaxRuleSets - 1> kDtypes = {
    c10::kByte,
    c10::kChar,
    c10::kShort,
    c10::kInt,
    c10::kLong,
    c10::kFloat,
    c10::kDouble,
    c10::kComplexHalf,
    c10::kComplexFloat,
    c10::kComplexDouble,
    c10::kBool,
    c10::kQInt8,
    c10::kQUInt8,
    c10::kQInt32,
    c10::kQUInt4x2,
    c10::kQUInt2x4,
    c10::kFloat8_e5m2,
    c10::kFloat8_e4m3fn,
    c10::kFloat8_e5m2fnuz,
    c10::kFloat8_e4m3fnuz,
    c10::kUInt16,
    c10::kUInt32,
    c10::kUInt64,
};

c10::DeviceType rules_slot(c10::DeviceType device) {
  return kRulesSlots[device == c10::DeviceType::CPU ? 0 : 1];
}

void show_rules(c10::DeviceType device, int rules) {
  const auto slot = rules_slot(device);
  const auto unused = slot == kRulesSlots[0] ? c10::kBFloat16 : c10::kHalf;  // as in a fresh thread
  at::autocast::set_autocast_enabled(slot, rules > 0);
  at::autocast::set_autocast_dtype(slot, rules > 0 ? kDtypes.at(static_cast<size_t>(rules) - 1) : unused);
}

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
  const auto slot = rules_slot(options.device);
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
      .previous_rules_flag = at::autocast::is_autocast_enabled(slot),
      .previous_rules_dtype = at::autocast::get_autocast_dtype(slot),
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
  if (options.rules > 0 || open_regions.back().previous_rules_flag) show_rules(options.device, options.rules);
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
    const auto slot = rules_slot(region.device);
    at::autocast::set_autocast_enabled(slot, region.previous_rules_flag);
    at::autocast::set_autocast_dtype(slot, region.previous_rules_dtype);
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
      return {Course::kFollowRules, region->rules, region, false};
    }
    return {Course::kLeaveAsIs, kNoRules, nullptr, false};
  }
  // A thread of autograd's inherits the state of a region it did not open.
  const bool inherited = open_regions.empty() && marked() && graph_task != -1;
  if (inherited && current_nesting() == 0) return {Course::kLeaveAsIs, kNoRules, nullptr, false};
  return by_default_rules(device, graph_task != -1);
}

void set_default_rules(c10::DeviceType device, int rules) {
  default_rules_plus_one[static_cast<size_t>(device)].store(rules + 1, std::memory_order_release);
  show_rules(device, rules);
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
