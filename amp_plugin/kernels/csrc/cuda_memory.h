// Device memory for tables, apart from torch's allocator: a table may outlive the CUDA graph, or the pool of
// a compiled function, in whose capture or warm-up it was made.
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

  // Takes the first slab from the device, before torch's allocator holds all there is.
  void reserve();
  // Memory for work of one stream: what is given back is used again by later work of that stream. Or memory
  // for a graph, which nobody uses when it is given back.
  Block take(size_t bytes, Handle stream, bool of_graph);
  void give_back(const Block& block);

 private:
  struct Slab {
    Address next = 0;
    size_t left = 0;
  };
  static Slab slab_of(size_t bytes);

  using Shelf = std::tuple<bool, Handle, size_t>;
  std::mutex mutex_;  // never held across a call of the driver: a callback of the driver gives memory back
  std::map<Shelf, std::vector<Address>> free_;
  Slab slab_;  // blocks are cut from it, and never joined again
};

// Copies bytes of the host to the device at once, whatever is being captured.
void copy_at_once(Address target, const void* source, size_t bytes);

// Calls `destroy(data)` when the graph that the stream is captured into, and all that was made of it, is
// gone; or before it raises.
void when_graph_is_gone(Handle stream, void* data, void (*destroy)(void* data));

}  // namespace amp_plugin::cuda
