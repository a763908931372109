// Device memory for tables. It does not come from torch's allocator. During the capture of a CUDA graph or
// the warm-up of a compiled function, torch's allocator uses a memory pool, and a table that is made then may
// outlive that pool.
#pragma once

#include <map>
#include <mutex>
#include <vector>

#include "cuda_driver.h"

namespace amp_plugin::cuda {

class Memory {
 public:
  struct Block {
    Address address;
    size_t bytes;
    Handle stream;
    bool of_graph;
  };

  // Allocates the first slab from the device, before torch's allocator has taken all of its memory.
  void reserve();
  // Returns memory for one stream or for one graph. Memory of a stream is reused by later work of the same
  // stream after it is given back. Memory of a graph is given back when nothing uses it any more.
  Block take(size_t bytes, Handle stream, bool of_graph);
  void give_back(const Block& block);

 private:
  struct Slab {
    Address next = 0;
    size_t left = 0;
  };
  static Slab slab_of(size_t bytes);

  using Shelf = std::tuple<bool, Handle, size_t>;
  std::mutex mutex_;  // not held during driver calls: a callback of the driver gives memory back
  std::map<Shelf, std::vector<Address>> free_;
  Slab slab_;  // blocks are cut from it and never merged again
};

// Copies bytes from the host to the device immediately, even during a capture.
void copy_at_once(Address target, const void* source, size_t bytes);

// Calls `destroy(data)` when the graph that the stream is being captured into, and everything made from that
// graph, has been destroyed. If this function raises, it calls `destroy(data)` first.
void when_graph_is_gone(Handle stream, void* data, void (*destroy)(void* data));

}  // namespace amp_plugin::cuda
