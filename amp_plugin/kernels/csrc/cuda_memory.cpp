#include "cuda_memory.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <memory>

namespace amp_plugin::cuda {
namespace {

constexpr size_t kSmallest = 16 * 1024;
constexpr size_t kSlab = 4 * 1024 * 1024;  // 64 tables of 1000 tensors
constexpr Status kOutOfMemory = 2;
constexpr unsigned kNonBlocking = 1, kNoDestructorSync = 1, kMove = 1;

// Asks torch's allocator to free the memory that it holds but does not use. It cannot do so while any stream
// is being captured; then this returns false.
bool release_cached_memory() {
  try {
    c10::getDeviceAllocator(c10::kCUDA)->emptyCache();
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

}  // namespace

Memory::Slab Memory::slab_of(size_t bytes) {
  const OutsideCapture outside;
  const size_t size = std::max(bytes, kSlab);
  Address address = 0;
  Status status = driver().cuMemAlloc(&address, size);
  if (status == kOutOfMemory && release_cached_memory()) status = driver().cuMemAlloc(&address, size);
  check(status, "allocate memory for a table of tensors");
  return {address, size};
}

void Memory::reserve() {
  const Slab made = slab_of(kSlab);
  const std::lock_guard lock(mutex_);
  slab_ = made;
}

Memory::Block Memory::take(size_t bytes, Handle stream, bool of_graph) {
  const size_t size = std::bit_ceil(std::max(bytes, kSmallest));
  std::unique_lock lock(mutex_);
  auto& shelf = free_[{of_graph, stream, size}];
  if (!shelf.empty()) {
    const Address address = shelf.back();
    shelf.pop_back();
    return {address, size, stream, of_graph};
  }
  Slab slab = slab_;
  if (slab.left < size) {
    lock.unlock();
    slab = slab_of(size);
    lock.lock();
  }
  const Slab rest{slab.next + size, slab.left - size};
  if (slab.next == slab_.next || rest.left > slab_.left) slab_ = rest;
  return {slab.next, size, stream, of_graph};
}

void Memory::give_back(const Block& block) {
  const std::lock_guard lock(mutex_);
  free_[{block.of_graph, block.stream, block.bytes}].push_back(block.address);
}

void copy_at_once(Address target, const void* source, size_t bytes) {
  const OutsideCapture outside;
  static std::mutex mutex;
  static std::map<Handle, Handle> streams;  // one stream per context
  const std::lock_guard lock(mutex);
  Handle context = nullptr;
  check(driver().cuCtxGetCurrent(&context), "report the current context");
  Handle& stream = streams[context];
  if (stream == nullptr) check(driver().cuStreamCreate(&stream, kNonBlocking), "create a stream");
  check(driver().cuMemcpyHtoDAsync(target, source, bytes, stream), "copy a table to the device");
  check(driver().cuStreamSynchronize(stream), "copy a table to the device");
}

void when_graph_is_gone(Handle stream, void* data, void (*destroy)(void* data)) {
  std::unique_ptr<void, void (*)(void*)> owned(data, destroy);
  int status = 0;
  uint64_t id = 0;
  Handle graph = nullptr, object = nullptr;
  check(
      driver().cuStreamGetCaptureInfo(stream, &status, &id, &graph, nullptr, nullptr),
      "report the state of the capture");
  TORCH_CHECK(status == kCaptured, "the capture of a CUDA graph has failed before this op was recorded");
  check(
      driver().cuUserObjectCreate(&object, data, destroy, 1, kNoDestructorSync),
      "attach the table to the CUDA graph");
  owned.release();  // from here on the user object destroys it
  const Status tied = driver().cuGraphRetainUserObject(graph, object, 1, kMove);
  if (tied != 0) driver().cuUserObjectRelease(object, 1);
  check(tied, "attach the table to the CUDA graph");
}

}  // namespace amp_plugin::cuda
