#include "cuda_table.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>

#include "plain_tensor.h"

namespace amp_plugin::cuda {
namespace {

constexpr size_t kKeptTables = 64;
constexpr size_t kTicketBytes = 16;
constexpr uint8_t kSizes[] = {2, 2, 4, 8, 8, 16};  // of an element, by code

size_t marks_bytes(size_t count) { return (4 * count + 15) / 16 * 16; }

[[noreturn]] void refuse_device(size_t i, size_t count, c10::Device device) {
  C10_THROW_ERROR(
      ValueError,
      c10::str(
          "tensor ", i, " of ", count, " is not on ", device,
          ", where the scale is; call the op once for each device"));
}

[[noreturn]] void refuse_dtype(size_t i, size_t count) {
  C10_THROW_ERROR(
      TypeError,
      c10::str(
          "tensor ", i, " of ", count,
          ": the CUDA kernels take float16, bfloat16, float32, float64, complex64, complex128; convert it"));
}

void require_aligned(uint64_t address, uint64_t numel, size_t size, size_t i, size_t count) {
  TORCH_CHECK_VALUE(
      address % size == 0 || numel == 0, "tensor ", i, " of ", count, " begins at address ", address,
      ", no multiple of its element size of ", size, " bytes; pass tensor.clone()");
}

bool is_of(const Row& row, const at::Tensor& tensor, c10::Device device) {
  if (!is_plain(tensor) || tensor.device() != device) return false;
  c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  if (code_of(tensor.scalar_type()) != row.dtype || static_cast<uint64_t>(impl.numel()) != row.numel)
    return false;
  if (row.out_address != 0) return false;  // of a cast
  if (row.numel == 0) return true;
  if (!impl.is_non_overlapping_and_dense() || !impl.unsafe_storage()) return false;
  const auto offset = static_cast<uint64_t>(impl.storage_offset()) * kSizes[row.dtype];
  c10::StorageImpl& storage = *impl.unsafe_storage().unsafeGetStorageImpl();
  return reinterpret_cast<uint64_t>(storage.mutable_data()) + offset == row.address;  // as rows_of
}

// The bytes as the upload needs them: the ticket, the rows, the marks; all but the rows 0.
void write_image(const Rows& rows, void* image, size_t bytes) {
  std::memset(image, 0, bytes);
  if (!rows.rows.empty())
    std::memcpy(static_cast<char*>(image) + kTicketBytes, rows.rows.data(), rows.rows.size() * sizeof(Row));
}

size_t image_bytes(size_t count) { return kTicketBytes + count * sizeof(Row) + marks_bytes(count); }

struct HeldByGraph {
  Memory* memory;
  Memory::Block block;
};

void give_back(void* held) {
  auto* of_graph = static_cast<HeldByGraph*>(held);
  of_graph->memory->give_back(of_graph->block);
  delete of_graph;
}

}  // namespace

bool are_of(const Row* rows, const at::Tensor* const* tensors, size_t count, c10::Device device) {
  for (size_t i = 0; i < count; ++i) {  // so that all are on their way before one is waited for
    const auto* storage = tensors[i]->unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    __builtin_prefetch(reinterpret_cast<const char*>(storage) + 16);
    __builtin_prefetch(reinterpret_cast<const char*>(storage) + 60);
  }
  for (size_t i = 0; i < count; ++i) {
    if (!is_of(rows[i], *tensors[i], device)) return false;
  }
  return true;
}

bool are_of(const Row* rows, at::TensorList tensors, c10::Device device) {
  return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
    return is_of(*rows++, tensor, device);
  });
}

uint8_t code_of(at::ScalarType type) {
  switch (type) {
    case at::kHalf: return 0;
    case at::kBFloat16: return 1;
    case at::kFloat: return 2;
    case at::kDouble: return 3;
    case at::kComplexFloat: return 4;
    case at::kComplexDouble: return 5;
    default: return kUnknownDtype;
  }
}

Rows rows_of(at::TensorList tensors, at::TensorList out, c10::Device device) {
  Rows result;
  result.rows.resize(tensors.size());
  result.count = static_cast<uint32_t>(tensors.size());
  uint64_t granules = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    Row& row = result.rows[i];
    if (tensor.device() != device) refuse_device(i, tensors.size(), device);
    row.dtype = code_of(tensor.scalar_type());
    if (row.dtype == kUnknownDtype) refuse_dtype(i, tensors.size());
    row.numel = static_cast<uint64_t>(tensor.numel());
    row.first_granule = static_cast<uint32_t>(granules);
    const size_t size = kSizes[row.dtype];
    if (out.empty()) {  // mutable: a lazily cloned tensor gets memory of its own before it is written
      row.address = reinterpret_cast<uint64_t>(tensor.mutable_data_ptr());
      if (row.numel > 0)
        granules += (row.address % 16 + row.numel * size + kGranuleBytes - 1) / kGranuleBytes;
    } else {
      row.address = reinterpret_cast<uint64_t>(tensor.const_data_ptr());
      row.out_address = reinterpret_cast<uint64_t>(out[i].mutable_data_ptr());
      row.out_dtype = code_of(out[i].scalar_type());
      require_aligned(row.out_address, row.numel, kSizes[row.out_dtype], i, tensors.size());
      granules += (row.numel + kGranuleElements - 1) / kGranuleElements;
    }
    require_aligned(row.address, row.numel, size, i, tensors.size());
  }
  TORCH_CHECK_VALUE(granules < UINT32_MAX, "these tensors are too large for one call; split the list");
  result.granules = static_cast<uint32_t>(granules);
  return result;
}

size_t TableCache::bytes_of(const Rows& rows) const {
  return image_bytes(rows.rows.size()) + most_blocks_ * sizeof(Partial);
}

Table TableCache::laid_out(const Rows& rows, Address begin) const {
  const size_t count = rows.rows.size();
  const Address marks = begin + kTicketBytes + count * sizeof(Row);
  return {
      .rows = begin + kTicketBytes,
      .marks = marks,
      .partials = marks + marks_bytes(count),
      .ticket = begin,
      .count = rows.count,
      .granules = rows.granules};
}

Table TableCache::of(const Rows& rows, Handle stream, bool captured) {
  if (captured) return for_graph(rows, stream);
  const std::lock_guard lock(mutex_);
  if (const Entry* kept = find(rows, stream)) return kept->table;
  const Memory::Block block = memory_.for_stream(stream, bytes_of(rows));
  const Table table = laid_out(rows, block.address);
  upload(rows, table);
  entries_.push_front(
      {.stream = stream,
       .rows = std::make_shared<const std::vector<Row>>(rows.rows),
       .memory = block,
       .table = table});
  if (entries_.size() > kKeptTables) {
    memory_.give_back(entries_.back().memory);
    entries_.pop_back();
  }
  return table;
}

const TableCache::Entry* TableCache::find(const Rows& rows, Handle stream) {
  const size_t count = rows.rows.size(), bytes = count * sizeof(Row);
  for (auto entry = entries_.begin(); entry != entries_.end(); ++entry) {
    if (entry->stream != stream || entry->rows->size() != count || entry->table.count != rows.count ||
        entry->table.granules != rows.granules)
      continue;
    if (count > 0 && std::memcmp(entry->rows->data(), rows.rows.data(), bytes) != 0) continue;
    entries_.splice(entries_.begin(), entries_, entry);
    return &entries_.front();
  }
  return nullptr;
}

std::optional<KeptTable> TableCache::kept(size_t count, const at::Tensor& first, Handle stream) {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return std::nullopt;
  const auto entry = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& candidate) {
    return candidate.stream == stream && candidate.rows->size() == count && candidate.table.count == count &&
        is_of(candidate.rows->front(), first, device_);
  });
  if (entry == entries_.end()) return std::nullopt;
  entries_.splice(entries_.begin(), entries_, entry);
  return KeptTable{.rows = entry->rows, .table = entry->table};
}

// From pinned memory, which torch's host allocator hands out again only behind the copy.
void TableCache::upload(const Rows& rows, const Table& table) {
  const auto bytes = static_cast<int64_t>(image_bytes(rows.rows.size()));
  const at::AutoDispatchBelowADInplaceOrView below;
  const at::Tensor pinned =
      at::empty({bytes}, at::TensorOptions(at::kByte).device(at::kCPU).pinned_memory(true));
  write_image(rows, pinned.mutable_data_ptr(), static_cast<size_t>(bytes));
  at::for_blob(reinterpret_cast<void*>(table.ticket), {bytes})
      .options(at::TensorOptions(at::kByte).device(device_))
      .target_device(device_)
      .make_tensor()
      .copy_(pinned, /*non_blocking=*/true);
  ++uploads_;
}

// Addresses are frozen in a graph, so its table is on the device before the first replay, and no node of the
// graph brings it there.
Table TableCache::for_graph(const Rows& rows, Handle stream) {
  const Memory::Block block = memory_.for_graph(bytes_of(rows));
  const Table table = laid_out(rows, block.address);
  std::vector<char> image(image_bytes(rows.rows.size()));
  write_image(rows, image.data(), image.size());
  copy_at_once(table.ticket, image.data(), image.size());
  when_graph_is_gone(stream, new HeldByGraph{&memory_, block}, &give_back);
  ++uploads_;
  return table;
}

}  // namespace amp_plugin::cuda
