// Which streams have written and read a buffer, so that one waits for another. Nothing on the CPU.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/util/SmallVector.h>

#include <memory>
#include <optional>

namespace amp_plugin {

// Stands for the current stream of the device; 0 on the CPU.
int64_t stream_number(c10::Device device);

class StreamOrder {
 public:
  // The place in the current stream of the device behind what was put there; none on the CPU.
  using Moment = std::shared_ptr<c10::Event>;
  static Moment now(c10::Device device);

  // Call before work that overwrites the buffer: it waits for those that read it on other streams.
  void before_write(const at::Tensor& buffer);
  void note_write(const at::Tensor& buffer, const Moment& written);

  // Call before work that reads the buffer: it waits until the buffer is written.
  void before_read(const at::Tensor& buffer);

 private:
  Moment written_;
  std::optional<c10::Stream> writer_;
  c10::SmallVector<c10::Stream, 1> readers_;  // others than the writer
};

}  // namespace amp_plugin
