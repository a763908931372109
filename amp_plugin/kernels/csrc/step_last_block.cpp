#include "step_last_block.h"

#include <cstring>

namespace amp_plugin {

LastBlock::LastBlock(const Row& row, int64_t begin, int64_t count) : block_(row) {
  const size_t grad = row.grad_type == at::kFloat ? sizeof(float) : sizeof(at::Half);
  const size_t param = row.weight == Weight::bfloat16_pair ? sizeof(at::BFloat16) : sizeof(float);
  block_.grad = hold(0, row.grad, grad, begin, count);
  block_.param = hold(1, row.param, param, begin, count);
  block_.beside = hold(2, row.beside, sizeof(at::Half), begin, count);
  for (size_t i = 0; i < kMostStates; ++i) {
    block_.states[i] = static_cast<float*>(hold(3 + i, row.states[i], sizeof(float), begin, count));
  }
}

void* LastBlock::hold(size_t part, const void* data, size_t size, int64_t begin, int64_t count) {
  if (data == nullptr) return nullptr;
  const auto* from = static_cast<const std::byte*>(data) + static_cast<size_t>(begin) * size;
  parts_[part] = {const_cast<std::byte*>(from), static_cast<size_t>(count) * size};
  std::memcpy(memory_[part], from, parts_[part].bytes);
  return memory_[part];
}

void LastBlock::write_back() const {
  for (size_t i = 1; i < kParts; ++i) {  // the gradient is only read
    if (parts_[i].bytes > 0) std::memcpy(parts_[i].outside, memory_[i], parts_[i].bytes);
  }
}

}  // namespace amp_plugin
