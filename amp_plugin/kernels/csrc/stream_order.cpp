#include "stream_order.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

namespace amp_plugin {
namespace {

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// The allocator is told of the stream, so that freed memory stays the buffer's until that has read it.
void keep_for(const at::Tensor& buffer, const c10::Stream& stream) {
  c10::impl::VirtualGuardImpl(stream.device_type())
      .recordDataPtrOnStream(buffer.storage().data_ptr(), stream);
}

void let_wait_for_all_of(const c10::Stream& other, const c10::Stream& stream) {
  c10::Event behind(other.device_type());
  behind.record(other);
  behind.block(stream);
}

}  // namespace

int64_t stream_number(c10::Device device) {
  return device.is_cpu() ? 0 : static_cast<int64_t>(current_stream(device).id());
}

StreamOrder::Moment StreamOrder::now(c10::Device device) {
  if (device.is_cpu()) return nullptr;
  auto moment = std::make_shared<c10::Event>(device.type());
  moment->record(current_stream(device));
  return moment;
}

void StreamOrder::before_write(const at::Tensor& buffer) {
  if (!writer_) return;
  const c10::Stream stream = current_stream(buffer.device());
  readers_.push_back(*writer_);  // it may have read what it wrote
  for (const c10::Stream& reader : readers_) {
    if (reader != stream) let_wait_for_all_of(reader, stream);
  }
  readers_.clear();
  if (*writer_ != stream) keep_for(buffer, stream);
}

void StreamOrder::note_write(const at::Tensor& buffer, const Moment& written) {
  if (buffer.device().is_cpu()) return;
  written_ = written;
  writer_ = current_stream(buffer.device());
}

void StreamOrder::before_read(const at::Tensor& buffer) {
  if (!writer_) return;
  const c10::Stream stream = current_stream(buffer.device());
  if (stream == *writer_ || std::find(readers_.begin(), readers_.end(), stream) != readers_.end()) return;
  written_->block(stream);
  keep_for(buffer, stream);
  readers_.push_back(stream);
}

}  // namespace amp_plugin
