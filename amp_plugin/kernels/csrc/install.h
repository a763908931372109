// Puts the autocast kernels into the dispatcher, and takes them back.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace amp_plugin {

// Sets what a rule set's number means for some ops of a device. An entry holds the rule in its low byte,
// and above it one bit for each argument that is never cast.
void set_rules(
    const std::string& device, int number, const std::vector<std::string>& ops,
    const std::vector<uint64_t>& entries);

// Gives every op its kernel back.
void uninstall();

// The ops of a device that have a kernel of ours.
std::vector<std::string> installed(const std::string& device);

}  // namespace amp_plugin
