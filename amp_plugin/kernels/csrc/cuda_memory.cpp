#include "cuda_memory.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>

namespace amp_plugin::cuda {
namespace {

constexpr size_t kSmallest = 16 * 1024;
constexpr size_t kSlab = 4 * 1024 * 1024;  // 64 tables of 1000 tensors
constexpr Status kOutOfMemory = 2;
constexpr unsigned kNonBlocking = 1, kNoDestructorSync = 1, kMove = 1;

}  // namespace

Memory::Slab Memory::slab_of(size_t bytes) {
  const OutsideCapture outside;
  const size_t size = std::max(bytes, kSlab);
  Address address = 0;
  Status status = driver().cuMemAlloc(&address, size);
  if (status == kOutOfMemory) {  // torch keeps memory that nobody uses
    c10::getDeviceAllocator(c10::kCUDA)->emptyCache();
    status = driver().cuMemAlloc(&address, size);
  }
  check(status, "the CUDA driver gives no memory for a table of tensors");
  return {address, size};
}

void Memory::reserve() {
  const std::lock_guard lock(mutex_);
  slab_ = slab_of(kSlab);
}

Memory::Block Memory::take(size_t bytes, Handle stream, bool of_graph) {
  const size_t size = std::bit_ceil(std::max(bytes, kSmallest));
  const std::lock_guard lock(mutex_);
  auto& shelf = free_[{of_graph, stream, size}];
  if (!shelf.empty()) {
    const Address address = shelf.back();
    shelf.pop_back();
    return {address, size, stream, of_graph};
  }
  if (slab_.left < size) slab_ = slab_of(size);
  const Address address = slab_.next;
  slab_ = {address + size, slab_.left - size};
  return {address, size, stream, of_graph};
}

void Memory::give_back(const Block& block) {
  const std::lock_guard lock(mutex_);
  free_[{block.of_graph, block.stream, block.bytes}].push_back(block.address);
}

void copy_at_once(Address target, const void* source, size_t bytes) {
  const OutsideCapture outside;
  thread_local std::map<Handle, Handle> streams;  // by context
  Handle context = nullptr;
  check(driver().cuCtxGetCurrent(&context), "the CUDA driver tells no context");
  Handle& stream = streams[context];
  if (stream == nullptr)
    check(driver().cuStreamCreate(&stream, kNonBlocking), "the CUDA driver makes no stream");
  check(driver().cuMemcpyHtoDAsync(target, source, bytes, stream), "the CUDA driver copies no table");
  check(driver().cuStreamSynchronize(stream), "the CUDA driver copies no table");
}

void when_graph_is_gone(Handle stream, void* data, void (*destroy)(void* data)) {
  int status = 0;
  uint64_t id = 0;
  Handle graph = nullptr, object = nullptr;
  check(
      driver().cuStreamGetCaptureInfo(stream, &status, &id, &graph, nullptr, nullptr),
      "the CUDA driver tells nothing of the capture");
  check(
      driver().cuUserObjectCreate(&object, data, destroy, 1, kNoDestructorSync),
      "the CUDA driver ties nothing to a graph");
  check(driver().cuGraphRetainUserObject(graph, object, 1, kMove), "the CUDA driver ties nothing to a graph");
}

}  // namespace amp_plugin::cuda
