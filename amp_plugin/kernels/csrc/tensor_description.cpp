// What a launch of a multi-tensor kernel needs to know of its tensors, gathered without Python:
// a list of a thousand costs microseconds instead of a millisecond. Read by kernels/cuda/description.py.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cstdint>

namespace amp_plugin {
namespace {

// Laid out as DESCRIPTION in kernels/cuda/description.py.
struct Description {
  uint64_t address;
  uint64_t out_address;
  uint64_t numel;
  uint32_t device;  // type * 65536 + index
  uint8_t dtype;
  uint8_t out_dtype;
  uint16_t flags;
};
static_assert(sizeof(Description) == 32);

constexpr uint16_t kDense = 1, kAlike = 2;  // one run of memory; laid out as its output, on the same device
constexpr uint8_t kUnknown = 255;

uint8_t code_of(at::ScalarType type) {
  switch (type) {
    case at::kHalf: return 0;
    case at::kBFloat16: return 1;
    case at::kFloat: return 2;
    case at::kDouble: return 3;
    case at::kComplexFloat: return 4;
    case at::kComplexDouble: return 5;
    default: return kUnknown;
  }
}

// Mutable: a lazily cloned tensor gets memory of its own before a kernel writes to it.
uint64_t address_of(const at::Tensor& tensor) {
  return reinterpret_cast<uint64_t>(tensor.mutable_data_ptr());
}

void increment_versions(at::TensorList tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  }
}

at::Tensor describe(at::TensorList tensors, at::TensorList out, bool writes) {
  TORCH_CHECK(
      out.empty() || out.size() == tensors.size(), "_describe: ", tensors.size(), " tensors and ", out.size(),
      " outputs; give one output for each tensor or none");
  at::Tensor result =
      at::empty({int64_t(tensors.size() * sizeof(Description))}, at::TensorOptions(at::kByte));
  auto* row = reinterpret_cast<Description*>(result.mutable_data_ptr());
  for (size_t i = 0; i < tensors.size(); ++i, ++row) {
    const at::Tensor& tensor = tensors[i];
    const at::Device device = tensor.device();
    *row = {address_of(tensor), 0, uint64_t(tensor.numel()), 0, code_of(tensor.scalar_type()), 0, 0};
    row->device = (uint32_t(device.type()) << 16) + uint16_t(device.index());
    row->flags = tensor.is_non_overlapping_and_dense() ? kDense : 0;
    if (out.empty()) continue;
    const at::Tensor& other = out[i];
    row->out_address = address_of(other);
    row->out_dtype = code_of(other.scalar_type());
    if (tensor.sizes() == other.sizes() && tensor.strides() == other.strides() && other.device() == device) {
      row->flags |= kAlike;
    }
  }
  if (writes) increment_versions(out.empty() ? tensors : out);
  return result;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(amp_plugin, library) {
  library.def("_describe(Tensor[] tensors, Tensor[] out, bool writes) -> Tensor", &describe);
  library.def("_increment_versions(Tensor[] tensors) -> ()", &increment_versions);
}

}  // namespace amp_plugin
