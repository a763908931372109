#include "pieces.h"

#include <ATen/Parallel.h>

#include <algorithm>

namespace amp_plugin {

std::vector<Piece> pieces_of(const std::vector<int64_t>& numels) {
  std::vector<Piece> pieces;
  pieces.reserve(numels.size());
  for (size_t tensor = 0; tensor < numels.size(); ++tensor) {
    for (int64_t begin = 0; begin < numels[tensor]; begin += kPiece)
      pieces.push_back({tensor, begin, std::min(numels[tensor], begin + kPiece)});
  }
  return pieces;
}

void for_each_task(
    const std::vector<Piece>& pieces, int64_t elements,
    c10::function_ref<void(size_t begin, size_t end)> run) {
  std::vector<size_t> first{0};  // the first piece of each task
  int64_t taken = 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    taken += pieces[i].end - pieces[i].begin;
    if (taken >= elements || i + 1 == pieces.size()) {
      first.push_back(i + 1);
      taken = 0;
    }
  }
  at::parallel_for(0, static_cast<int64_t>(first.size()) - 1, 1, [&](int64_t begin, int64_t end) {
    run(first[begin], first[end]);
  });
}

void for_each_piece(
    const std::vector<int64_t>& numels,
    c10::function_ref<void(size_t tensor, int64_t begin, int64_t end)> run) {
  const std::vector<Piece> pieces = pieces_of(numels);
  for_each_task(pieces, 2 * kPiece, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) run(pieces[i].tensor, pieces[i].begin, pieces[i].end);
  });
}

}  // namespace amp_plugin
