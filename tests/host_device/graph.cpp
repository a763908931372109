// Launches of the package's kernels, and CUDA graphs: what the ops of a capture do is noted and undone; a
// replay does it again.
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "host_device.h"

namespace host_device {
namespace {

struct Graph {
  std::vector<std::function<void()>> work;
  std::vector<std::pair<c10::Storage, std::vector<char>>> before;  // what the storages found held
  std::map<const c10::StorageImpl*, c10::Storage> made;
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
  Graph& graph = graphs.at(current);
  for (const auto& [storage, bytes] : graph.before) {
    std::memcpy(storage.mutable_data(), bytes.data(), bytes.size());
  }
  for (const auto& [_, storage] : graph.made) std::memset(storage.mutable_data(), 0xAB, storage.nbytes());
  graph.before.clear();
}

void replay(int64_t number) {
  std::lock_guard lock(mutex);
  for (const auto& work : graphs.at(number).work) work();
}

void release(int64_t number) {
  std::lock_guard lock(mutex);
  graphs.erase(number);
}

}  // namespace

bool capturing() { return active; }

void found(const c10::Storage& storage) {
  if (!active || storage.nbytes() == 0) return;
  std::lock_guard lock(mutex);
  Graph& graph = graphs.at(current);
  if (graph.made.count(storage.unsafeGetStorageImpl())) return;
  for (const auto& [known, _] : graph.before) {
    if (known.data() == storage.data()) return;
  }
  const char* data = static_cast<const char*>(storage.data());
  graph.before.emplace_back(storage, std::vector<char>(data, data + storage.nbytes()));
}

void made(const c10::Storage& storage) {
  if (!active || storage.nbytes() == 0) return;
  std::lock_guard lock(mutex);
  graphs.at(current).made.emplace(storage.unsafeGetStorageImpl(), storage);
}

void record(std::function<void()> work) {
  std::lock_guard lock(mutex);
  graphs.at(current).work.push_back(std::move(work));
}

namespace {

// A kernel of the package, compiled for the CPU: see tests/cuda_emulation. Its arguments lie one behind
// another.
void launch(
    int64_t kernel, int64_t blocks, int64_t threads, bool descending, at::Tensor arguments,
    at::IntArrayRef offsets) {
  using Kernel = const char* (*)(unsigned, unsigned, void**, int);
  const std::vector<int64_t> places = offsets.vec();
  auto work = [=] {
    std::vector<void*> pointers;
    for (int64_t place : places) pointers.push_back(static_cast<char*>(arguments.mutable_data_ptr()) + place);
    static std::mutex one_at_a_time;  // an emulated kernel keeps its threads in globals
    std::lock_guard lock(one_at_a_time);
    const char* error =
        reinterpret_cast<Kernel>(kernel)(unsigned(blocks), unsigned(threads), pointers.data(), descending);
    TORCH_CHECK(error == nullptr, error);
  };
  capturing() ? record(work) : work();
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(host_device, library) {
  library.def(
      "launch(int kernel, int blocks, int threads, bool descending, Tensor arguments, int[] offsets) -> ()",
      &launch);
  library.def("capture_begin() -> int", &begin);
  library.def("capture_end() -> ()", &end);
  library.def("capturing() -> bool", &capturing);
  library.def("replay(int graph) -> ()", &replay);
  library.def("release(int graph) -> ()", &release);
}

}  // namespace host_device
