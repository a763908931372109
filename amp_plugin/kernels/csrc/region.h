// The regions that are open in a thread, and what an op inside them does.
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
  int nesting;  // torch's autocast nesting level in this region
  int graph_task;  // the backward pass that it was opened in, or -1
  bool cache_enabled;
  // torch's state before the region was opened. It is restored when the region is closed.
  bool previous_enabled;
  c10::ScalarType previous_dtype;
  bool previous_cache_enabled;
  bool previous_marker;
  int previous_code;
};

// What an op does when it is reached through an autocast key.
enum class Course {
  kFollowRules,  // cast as our op rules say
  kTorchKernel,  // none of our rules apply: call torch's own kernel
  kLeaveAsIs,  // in a backward pass that started inside an open region: cast nothing
};

// Which cache holds the casts of weights.
enum class Keeper {
  kNobody,
  kRegion,  // our innermost region (region_casts.h)
  kTorch,  // torch's own cache, in a torch.autocast block
};

struct Plan {
  Course course;
  int rules;
  Keeper keeper;
};

// Opens a region: sets torch's autocast state and remembers the previous one.
Region enter_region(RegionOptions options);

// Closes an open region of this thread. The innermost region is number 0.
void exit_region(size_t from_innermost);

// Decides what an op on `device` does if it is called now in this thread.
Plan plan_for(c10::DeviceType device);

// Sets the rules for autocast blocks outside our regions, for each device. kNoRules means torch's kernels.
void set_default_rules(c10::DeviceType device, int rules);

}  // namespace amp_plugin
