// CUDA graphs. A capture records the ops and undoes their effects; a replay runs them again.
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "host_device.h"

namespace host_device {
namespace {

struct Graph {
  std::vector<std::function<void()>> work;
  Footprint footprint;
  std::vector<std::shared_ptr<void>> kept;
};

std::atomic<bool> active{false};
std::recursive_mutex mutex;
std::map<int64_t, Graph> graphs;
int64_t current = 0;

int64_t begin() {
  std::lock_guard lock(mutex);
  TORCH_CHECK(!active, "a graph is being captured already");
  graphs[++current];
  active = true;
  return current;
}

void end() {
  std::lock_guard lock(mutex);
  active = false;
  graphs.at(current).footprint.undo();
}

void replay(int64_t number) {
  std::lock_guard lock(mutex);
  for (const auto& work : graphs.at(number).work) submit(current_stream(), work);
}

// Destroys a graph. As in CUDA, a graph that is still running is destroyed when it has finished.
void release(int64_t number) {
  std::lock_guard lock(mutex);
  auto node = graphs.extract(number);
  if (works_late() && !node.empty())
    when_all_is_done([gone = std::make_shared<decltype(node)>(std::move(node))] {});
}

}  // namespace

bool capturing() { return active; }

void Footprint::find(const c10::Storage& storage) {
  if (storage.nbytes() == 0 || made.count(storage.unsafeGetStorageImpl())) return;
  for (const auto& [known, _] : before) {
    if (known.data() == storage.data()) return;
  }
  const char* data = static_cast<const char*>(storage.data());
  before.emplace_back(storage, std::vector<char>(data, data + storage.nbytes()));
}

void Footprint::make(const c10::Storage& storage) {
  if (storage.nbytes() > 0) made.emplace(storage.unsafeGetStorageImpl(), storage);
}

void Footprint::undo() {
  for (const auto& [storage, bytes] : before) {
    std::memcpy(storage.mutable_data(), bytes.data(), bytes.size());
  }
  for (const auto& [_, storage] : made) std::memset(storage.mutable_data(), 0xAB, storage.nbytes());
  before.clear();
}

namespace {

thread_local Footprint* of_this_op = nullptr;

template <typename Note>
void note(const Note& note) {
  if (of_this_op != nullptr) return note(*of_this_op);
  if (!active) return;
  std::lock_guard lock(mutex);
  note(graphs.at(current).footprint);
}

}  // namespace

void found(const c10::Storage& storage) {
  note([&](Footprint& footprint) { footprint.find(storage); });
}

void made(const c10::Storage& storage) {
  note([&](Footprint& footprint) { footprint.make(storage); });
}

void without_effect(const std::function<void()>& run) {
  Footprint footprint;
  of_this_op = &footprint;
  try {
    run();
  } catch (...) {
    of_this_op = nullptr;
    throw;
  }
  of_this_op = nullptr;
  footprint.undo();
}

void record(std::function<void()> work) {
  std::lock_guard lock(mutex);
  graphs.at(current).work.push_back(std::move(work));
}

void keep_with_graph(std::shared_ptr<void> object) {
  std::lock_guard lock(mutex);
  graphs.at(current).kept.push_back(std::move(object));
}

TORCH_LIBRARY_FRAGMENT(host_device, library) {
  library.def("capture_begin() -> int", &begin);
  library.def("capture_end() -> ()", &end);
  library.def("capturing() -> bool", &capturing);
  library.def("replay(int graph) -> ()", &replay);
  library.def("release(int graph) -> ()", &release);
}

}  // namespace host_device
