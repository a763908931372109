// Registers our autocast kernels with the dispatcher, and removes them again.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace amp_plugin {

// Sets the entries of some ops of a device in the rule set with this number. An entry holds the rule in its
// low byte, and above it one bit for each argument that is never cast.
void set_rules(
    const std::string& device_name, int number, const std::vector<std::string>& ops,
    const std::vector<uint64_t>& entries);

// Removes our kernels, so that every op has torch's autocast kernel again.
void uninstall();

}  // namespace amp_plugin
