// Cuts the elements of many tensors into pieces, and shares the pieces among threads.
#pragma once

#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace amp_plugin {

// The most elements of a piece. The rounding errors of a float32 sum over a piece are small enough, and a
// piece fits into the L2 cache.
constexpr int64_t kPiece = 32768;

// Elements [begin, end) of the tensor with this number. `begin` is a multiple of kPiece.
struct Piece {
  size_t tensor;
  int64_t begin;
  int64_t end;
};

// The pieces of tensors with these numbers of elements, in order.
std::vector<Piece> pieces_of(const std::vector<int64_t>& numels);

// Calls run(tensor, begin, end) for all pieces of tensors with these numbers of elements, on all threads.
void for_each_piece(
    const std::vector<int64_t>& numels,
    c10::function_ref<void(size_t tensor, int64_t begin, int64_t end)> run);

// Calls run(begin, end) for ranges of pieces that together cover all pieces, on all threads. A thread gets at
// least `elements` elements at a time. That should take some 40 us, much longer than starting and joining
// threads.
void for_each_task(
    const std::vector<Piece>& pieces, int64_t elements,
    c10::function_ref<void(size_t begin, size_t end)> run);

}  // namespace amp_plugin
