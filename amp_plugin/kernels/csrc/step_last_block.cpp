#include "step_last_block.h"

#include <cstring>

namespace amp_plugin {

LastBlock::LastBlock(const Row& row, int64_t begin, int64_t count) : block_(row) {
  const int64_t grad = row.grad_type == at::kFloat ? sizeof(float) : sizeof(at::BFloat16);
  const int64_t param = row.weight == Weight::bfloat16_pair ? sizeof(at::BFloat16) : sizeof(float);
  const int64_t half = sizeof(int16_t);
  block_.grad = hold(0, row.grad, begin * grad, count * grad);
  block_.param = hold(1, row.param, begin * param, count * param);
  block_.remainder = hold(2, row.remainder, begin * half, count * half);
  block_.offset = row.offset + begin;
  for (size_t i = 0; i < kMostStates; ++i) {
    block_.states[i] =
        hold(3 + i, row.states[i], state_bytes(row.state, begin), state_bytes(row.state, count));
  }
}

void* LastBlock::hold(size_t part, void* data, int64_t begin, int64_t bytes) {
  if (data == nullptr) return nullptr;
  auto* from = static_cast<std::byte*>(data) + begin;
  parts_[part] = {from, static_cast<size_t>(bytes)};
  std::memcpy(memory_[part], from, parts_[part].bytes);
  return memory_[part];
}

void LastBlock::write_back(size_t part) const {
  if (parts_[part].bytes > 0) std::memcpy(parts_[part].outside, memory_[part], parts_[part].bytes);
}

void LastBlock::write_rest_back() const {
  for (size_t part = 1; part < kParts; ++part) write_back(part);
}

}  // namespace amp_plugin
