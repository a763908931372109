// The regions a thread has open, and what an op in them is to do.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <cstddef>

namespace amp_plugin {

constexpr int kNoRules = -1;

struct RegionOptions {
  c10::DeviceType device;
  c10::ScalarType dtype;
  bool enabled;
  bool cache_enabled;
  int rules;
};

struct Region {
  c10::DeviceType device;
  int nesting;  // torch's autocast nesting level inside this region
  int graph_task;  // the backward pass it was opened in, -1 for none
  bool cache_enabled;
  // What torch's state was, to be restored.
  bool previous_enabled;
  c10::ScalarType previous_dtype;
  bool previous_cache_enabled;
  bool previous_marker;
  int previous_code;
};

// What an op reached through an autocast key is to do.
enum class Course {
  kFollowRules,  // cast by our rules
  kTorchKernel,  // nothing of ours is active: call torch's own kernel
  kLeaveAsIs,  // a backward pass inside a region opened outside it: cast nothing
};

// Who keeps casts of weights.
enum class Keeper {
  kNobody,
  kRegion,  // the innermost region of ours (region_casts.h)
  kTorch,  // torch's own cache: a block of torch's, which has torch's bits
};

struct Plan {
  Course course;
  int rules;
  Keeper keeper;
};

// Opens a region: sets torch's autocast state and remembers the previous one.
Region enter_region(RegionOptions options);

// Closes an open region of this thread, counted from the innermost one, 0.
void exit_region(size_t from_innermost);

// Decides for an op of `device` called now in this thread.
Plan plan_for(c10::DeviceType device);

// Rules for autocast blocks outside our regions, per device; kNoRules for torch's kernels.
void set_default_rules(c10::DeviceType device, int rules);

}  // namespace amp_plugin
