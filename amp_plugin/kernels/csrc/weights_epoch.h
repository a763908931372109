// Counts the moments at which weights may have changed unseen; a kept cast is good only in its own epoch.
#pragma once

#include <c10/core/DeviceType.h>

#include <cstdint>

namespace amp_plugin {

uint64_t weights_epoch();

// Makes every cast kept so far, in every thread, invalid. Called while a CUDA graph is being captured it
// also notes that weights change whenever the graph is replayed, which nothing will tell.
void invalidate_weight_casts();

// A step was captured: in this process weights change in replays that nobody sees.
bool steps_are_captured();

// True while the device's current stream records a graph, or where that cannot be told.
bool is_capturing(c10::DeviceType device);

}  // namespace amp_plugin
