// Streams and events. Work normally runs immediately. If a test asks for late work, it runs only when
// somebody waits for its stream. Code that forgets to wait then finds old or meaningless numbers.
#include <torch/library.h>

#include <atomic>
#include <deque>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "host_device.h"

namespace host_device {
namespace {

struct Queue {
  std::deque<std::function<void()>> work;
  uint64_t put = 0, done = 0;
};

std::atomic<bool> late{false};
std::recursive_mutex mutex;
std::map<Stream, Queue> queues;
std::vector<std::function<void()>> at_the_end;
thread_local std::map<c10::DeviceIndex, int64_t> current;

void be_late(bool on) {
  wait_for_all();
  late = on;
  std::lock_guard lock(mutex);
  for (const auto& work : std::exchange(at_the_end, {})) work();
}

}  // namespace

bool works_late() { return late; }

Stream current_stream(c10::DeviceIndex device) {
  const c10::DeviceIndex index = device_at(device).index();
  return {index, current[index]};
}

void set_current_stream(Stream stream) { current[stream.device] = stream.number; }

void submit(Stream stream, std::function<void()> work) {
  if (!late) return work();
  std::lock_guard lock(mutex);
  Queue& queue = queues[stream];
  queue.work.push_back(std::move(work));
  ++queue.put;
}

void when_all_is_done(std::function<void()> work) {
  std::lock_guard lock(mutex);
  at_the_end.push_back(std::move(work));
}

Moment now_on(Stream stream) {
  std::lock_guard lock(mutex);
  return {stream, queues[stream].put};
}

bool has_come(const Moment& moment) {
  std::lock_guard lock(mutex);
  return queues[moment.stream].done >= moment.position;
}

void wait_for(const Moment& moment) {
  std::lock_guard lock(mutex);
  Queue& queue = queues[moment.stream];
  while (queue.done < moment.position && !queue.work.empty()) {
    const auto work = std::move(queue.work.front());
    queue.work.pop_front();
    work();
    ++queue.done;
  }
}

void wait_for_all() {
  std::lock_guard lock(mutex);
  for (auto& [stream, _] : queues) wait_for(now_on(stream));
}

void let_wait(Stream stream, const Moment& moment) {
  submit(stream, [moment] { wait_for(moment); });
}

namespace {

TORCH_LIBRARY_FRAGMENT(host_device, library) {
  library.def("late(bool on) -> ()", &be_late);
  library.def("current_stream(int device) -> int", [](int64_t device) {
    return current_stream(c10::DeviceIndex(device)).number;
  });
  library.def("set_stream(int device, int number) -> ()", [](int64_t device, int64_t number) {
    set_current_stream({c10::DeviceIndex(device), number});
  });
  library.def("now_on(int device, int number) -> int", [](int64_t device, int64_t number) {
    return int64_t(now_on({c10::DeviceIndex(device), number}).position);
  });
  library.def(
      "has_come(int device, int number, int position) -> bool",
      [](int64_t device, int64_t number, int64_t position) {
        return has_come({{c10::DeviceIndex(device), number}, uint64_t(position)});
      });
  library.def(
      "synchronize_with(int device, int number, int position) -> ()",
      [](int64_t device, int64_t number, int64_t position) {
        check_may_wait("a stream or an event");
        wait_for({{c10::DeviceIndex(device), number}, uint64_t(position)});
      });
  library.def(
      "let_wait(int device, int number, int of_device, int of_number, int position) -> ()",
      [](int64_t device, int64_t number, int64_t of_device, int64_t of_number, int64_t position) {
        let_wait(
            {c10::DeviceIndex(device), number},
            {{c10::DeviceIndex(of_device), of_number}, uint64_t(position)});
      });
}

}  // namespace
}  // namespace host_device
