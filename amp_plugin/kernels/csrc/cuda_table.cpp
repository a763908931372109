#include "cuda_table.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>

#include "tensor_memory.h"

namespace amp_plugin::cuda {
namespace {

constexpr size_t kKeptTables = 64;
constexpr size_t kTicketBytes = 16;
constexpr uint8_t kSizes[] = {2, 2, 4, 8, 8, 16};  // bytes per element, by dtype code

size_t marks_bytes(size_t count) { return (4 * count + 15) / 16 * 16; }

bool is_of(const Row& row, const at::Tensor& tensor, c10::Device device) {
  if (!is_plain(tensor) || tensor.device() != device) return false;
  c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  if (code_of(tensor.scalar_type()) != row.dtype || static_cast<uint64_t>(impl.numel()) != row.numel)
    return false;
  if (row.out_address != 0) return false;  // a row of a step, which has a second tensor
  if (row.numel == 0) return true;
  if (!impl.is_non_overlapping_and_dense() || !impl.unsafe_storage()) return false;
  const auto offset = static_cast<uint64_t>(impl.storage_offset()) * kSizes[row.dtype];
  c10::StorageImpl& storage = *impl.unsafe_storage().unsafeGetStorageImpl();
  // the address that rows_of() would store
  return reinterpret_cast<uint64_t>(storage.mutable_data()) + offset == row.address;
}

size_t image_bytes(size_t count) { return kTicketBytes + count * sizeof(Row) + marks_bytes(count); }

// Writes the bytes to upload: the ticket, the rows, the marks. The ticket and the marks are 0.
void write_image(const std::vector<Row>& rows, void* image) {
  std::memset(image, 0, image_bytes(rows.size()));
  if (!rows.empty())
    std::memcpy(static_cast<char*>(image) + kTicketBytes, rows.data(), rows.size() * sizeof(Row));
}

Table laid_out(const Rows& rows, Address begin) {
  const size_t count = rows.rows.size();
  const Address marks = begin + kTicketBytes + count * sizeof(Row);
  return {
      .rows = reinterpret_cast<const Row*>(begin + kTicketBytes),
      .marks = reinterpret_cast<u32*>(marks),
      .partials = reinterpret_cast<Partial*>(marks + marks_bytes(count)),
      .ticket = reinterpret_cast<u32*>(begin),
      .count = rows.count,
      .granules = rows.granules};
}

bool is_table_of(const HeldTable& held, const Rows& rows, Handle stream) {
  const size_t count = rows.rows.size();
  return held.block.stream == stream && held.rows.size() == count && held.table.count == rows.count &&
      held.table.granules == rows.granules &&
      (count == 0 || std::memcmp(held.rows.data(), rows.rows.data(), count * sizeof(Row)) == 0);
}

}  // namespace

bool are_of(const Row* rows, at::TensorList tensors, c10::Device device) {
  constexpr size_t kBlock = 16;
  for (size_t begin = 0; begin < tensors.size(); begin += kBlock) {
    const at::TensorList block = tensors.slice(begin, std::min(kBlock, tensors.size() - begin));
    for (const at::Tensor& tensor : block) {  // prefetch all of them before the first one is read
      const auto* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
      __builtin_prefetch(reinterpret_cast<const char*>(storage) + 16);
      __builtin_prefetch(reinterpret_cast<const char*>(storage) + 60);
    }
    for (const at::Tensor& tensor : block) {
      if (!is_of(*rows++, tensor, device)) return false;
    }
  }
  return true;
}

u8 code_of(at::ScalarType type) {
  switch (type) {
    case at::kHalf: return kFloat16;
    case at::kBFloat16: return kBFloat16;
    case at::kFloat: return kFloat32;
    case at::kDouble: return kFloat64;
    case at::kComplexFloat: return kComplex64;
    case at::kComplexDouble: return kComplex128;
    default: return kUnknownDtype;
  }
}

void Rows::give(Row& row, uint64_t taken) {
  TORCH_CHECK_VALUE(
      granules + taken < UINT32_MAX, "these tensors are too large for one call; split the list");
  row.first_granule = granules;
  granules += static_cast<uint32_t>(taken);
}

Rows rows_of(at::TensorList tensors, c10::Device device) {
  Rows result(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    Row& row = result.rows[i];
    TORCH_CHECK_VALUE(
        tensor.device() == device, "tensor ", i, " of ", tensors.size(), " is not on ", device,
        ", where the scale is; call the op once for each device");
    row.dtype = code_of(tensor.scalar_type());
    TORCH_CHECK_TYPE(
        row.dtype != kUnknownDtype, "tensor ", i, " of ", tensors.size(),
        ": the CUDA kernels take float16, bfloat16, float32, float64, complex64, complex128; convert it");
    row.numel = static_cast<uint64_t>(tensor.numel());
    const size_t size = kSizes[row.dtype];
    // mutable_data_ptr() gives a lazily cloned tensor its own memory before a kernel writes to it.
    row.address = reinterpret_cast<uint64_t>(tensor.mutable_data_ptr());
    const uint64_t bytes = row.address % 16 + row.numel * size;
    const uint64_t extra = tensors.size() > 1 ? kGranulesOfTensor : 0;
    result.give(row, row.numel > 0 ? (bytes + kGranuleBytes - 1) / kGranuleBytes + extra : 0);
    TORCH_CHECK_VALUE(
        row.address % size == 0 || row.numel == 0, "tensor ", i, " of ", tensors.size(),
        " begins at address ", row.address, ", which is not a multiple of its element size of ", size,
        " bytes; pass tensor.clone()");
  }
  return result;
}

HeldTable::HeldTable(Memory& memory, const Rows& rows, Handle stream, bool of_graph, size_t most_blocks)
    : memory(memory),
      rows(rows.rows),
      block(memory.take(image_bytes(rows.rows.size()) + most_blocks * sizeof(Partial), stream, of_graph)),
      table(laid_out(rows, block.address)) {}

template <typename Fits>
SharedTable TableCache::find(const Fits& fits) {
  const auto entry = std::ranges::find_if(entries_, [&](const SharedTable& held) { return fits(*held); });
  if (entry == entries_.end()) return nullptr;
  entries_.splice(entries_.begin(), entries_, entry);
  return entries_.front();
}

SharedTable TableCache::of(const Rows& rows, Handle stream, bool captured) {
  if (captured) return for_graph(rows, stream);
  const std::lock_guard lock(mutex_);
  SharedTable found = find([&](const HeldTable& candidate) { return is_table_of(candidate, rows, stream); });
  if (found) return found;
  SharedTable made = std::make_shared<const HeldTable>(memory_, rows, stream, false, most_blocks_);
  upload(*made);
  entries_.push_front(made);
  if (entries_.size() > kKeptTables) entries_.pop_back();
  return made;
}

SharedTable TableCache::kept(size_t count, const at::Tensor& first, Handle stream) {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return nullptr;
  return find([&](const HeldTable& candidate) {
    return candidate.block.stream == stream && candidate.rows.size() == count &&
        candidate.table.count == count && is_of(candidate.rows.front(), first, device_);
  });
}

// Copies from pinned memory. torch's host allocator reuses that memory only after the copy has ended.
void TableCache::upload(const HeldTable& held) {
  const OutsideCapture outside;  // else allocating pinned memory would break another thread's capture
  const auto bytes = static_cast<int64_t>(image_bytes(held.rows.size()));
  const at::AutoDispatchBelowADInplaceOrView below;
  const at::Tensor pinned =
      at::empty({bytes}, at::TensorOptions(at::kByte).device(at::kCPU).pinned_memory(true));
  write_image(held.rows, pinned.mutable_data_ptr());
  at::for_blob(held.table.ticket, {bytes})
      .options(at::TensorOptions(at::kByte).device(device_))
      .target_device(device_)
      .make_tensor()
      .copy_(pinned, /*non_blocking=*/true);
  ++uploads_;
}

// A graph replays with fixed addresses. Its table is uploaded now, before the first replay; no node of the
// graph uploads it.
SharedTable TableCache::for_graph(const Rows& rows, Handle stream) {
  SharedTable made = std::make_shared<const HeldTable>(memory_, rows, nullptr, true, most_blocks_);
  std::vector<char> image(image_bytes(rows.rows.size()));
  write_image(rows.rows, image.data());
  copy_at_once(made->block.address, image.data(), image.size());
  when_graph_is_gone(
      stream, new SharedTable(made), [](void* held) { delete static_cast<SharedTable*>(held); });
  ++uploads_;
  return made;
}

}  // namespace amp_plugin::cuda
