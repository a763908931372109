// The regions a thread has open, and what an op in them is to do.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

namespace amp_plugin {

// Number of distinct rule sets a process may use, the default one, 0, among them.
constexpr int kMaxRuleSets = 585;
constexpr int kNoRules = -1;

struct RegionOptions {
  c10::DeviceType device;
  c10::ScalarType dtype;
  bool enabled;
  bool cache_enabled;
  int rules;
};

struct Region {
  const void* owner;
  c10::DeviceType device;
  int rules;
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

struct Plan {
  Course course;
  int rules;
  const Region* region;  // keeps casts of weights; null outside our own regions
  bool in_torch_cache;  // torch keeps them, as in its own block
};

// Opens a region: sets torch's autocast state and remembers the previous one.
void enter_region(const void* owner, RegionOptions options);

// Closes the innermost region opened by `owner`; false if there is none in this thread.
bool exit_region(const void* owner);

// Decides for an op of `device` called now in this thread.
Plan plan_for(c10::DeviceType device);

// Says in torch's autocast state whose rules are in force on a device from now on.
void show_rules(c10::DeviceType device, int rules);

// Rules for autocast blocks outside our regions, per device; kNoRules for torch's kernels.
void set_default_rules(c10::DeviceType device, int rules);

// The innermost open region of each device in this thread: (device type, rules, cache flag) triples,
// flattened.
std::vector<int64_t> innermost_regions();

// An op in this thread wrote to `tensor`: casts kept of that memory are stale.
void note_write(const at::Tensor& tensor);

}  // namespace amp_plugin
