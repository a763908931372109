// The ops of the host device. Each runs the CPU's op on host tensors that share the device tensors' memory.
#include <ATen/EmptyTensor.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_log_softmax.h>
#include <ATen/ops/_softmax.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "host_device.h"

namespace host_device {
namespace {

const std::set<std::string> kTakesTensorsOfBoth = {
    "aten::copy_", "aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_", "aten::set_"};
const std::set<std::string> kWaits = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select", "aten::_unique2"};

void release_storage(void* storage) { delete static_cast<c10::Storage*>(storage); }

// A storage on another device that shares the memory.
c10::Storage on(c10::Device device, const c10::Storage& storage) {
  auto* data = const_cast<void*>(storage.data());
  c10::DataPtr pointer = device.is_cpu()
      ? c10::DataPtr(data, new c10::Storage(storage), &release_storage, device)
      : device_memory(data, storage.nbytes(), device, [storage] {});
  c10::Allocator* owner = device.is_cpu() ? c10::GetCPUAllocator() : allocator();
  return {c10::Storage::use_byte_size_t{}, storage.nbytes(), std::move(pointer), owner, true};
}

at::Tensor tensor_of(const c10::Storage& storage, const at::Tensor& like) {
  c10::InferenceMode mode(like.is_inference());
  const auto key = storage.device().is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
  at::Tensor tensor =
      at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  tensor._set_conj(like.is_conj());
  tensor._set_neg(like.is_neg());
  return tensor;
}

bool same_layout(const at::Tensor& one, const at::Tensor& other) {
  return one.sizes() == other.sizes() && one.strides() == other.strides() &&
      one.storage_offset() == other.storage_offset();
}

// One call of an op: maps each device tensor to the host tensor that stands in for it.
class Call {
 public:
  at::Tensor host(const at::Tensor& tensor) {
    if (tensor.defined() && !tensor.is_cuda()) of_host_.push_back(tensor);
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    device_ = tensor.device();
    if (tensor._is_zerotensor()) return at::zeros(tensor.sizes(), tensor.options().device(c10::kCPU));
    c10::Storage storage;
    for (const auto& [ours, theirs] : pairs_) {
      if (ours.is_same(tensor)) return theirs;
      if (ours.storage().is_alias_of(tensor.storage())) storage = theirs.storage();
    }
    if (!storage) storage = on(c10::kCPU, tensor.storage());
    found(tensor.storage());
    pairs_.emplace_back(tensor, tensor_of(storage, tensor));
    return pairs_.back().second;
  }

  void make_on(c10::Device device) { device_ = device_at(device.index()); }
  void make_on_host() { device_.reset(); }

  at::Tensor device(const at::Tensor& result) const {
    if (!result.defined() || !result.device().is_cpu()) return result;
    for (const at::Tensor& given : of_host_) {
      if (given.is_same(result)) return result;
    }
    for (const auto& [ours, theirs] : pairs_) {
      if (theirs.is_same(result)) return ours;
    }
    for (const auto& [ours, theirs] : pairs_) {
      if (result.storage().is_alias_of(theirs.storage())) return tensor_of(ours.storage(), result);
    }
    if (!device_) return result;
    const c10::Storage storage = on(*device_, result.storage());
    made(storage);
    return tensor_of(storage, result);
  }

  // Copies back the metadata that resize_ and set_ change.
  void take_over_metadata() const {
    for (const auto& [ours, theirs] : pairs_) {
      c10::StorageImpl* storage = ours.storage().unsafeGetStorageImpl();
      if (storage->data() != theirs.storage().data() || storage->nbytes() != theirs.storage().nbytes()) {
        c10::Storage moved = on(ours.device(), theirs.storage());
        storage->set_data_ptr_noswap(moved.set_data_ptr(c10::DataPtr()));
        storage->set_nbytes(theirs.storage().nbytes());
      }
      if (!same_layout(ours, theirs)) {
        ours.unsafeGetTensorImpl()->set_sizes_and_strides(
            theirs.sizes(), theirs.strides(), theirs.storage_offset());
      }
    }
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;
  std::vector<at::Tensor> of_host_;
  std::optional<c10::Device> device_;
};

template <typename Change>
c10::IValue map_tensors(const c10::IValue& value, const Change& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(change(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor ? std::optional<at::Tensor>(change(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

// Checks what TensorIterator and torch's CUDA kernels check: all tensors are on one device, except
// one-element CPU tensors.
class DeviceCheck {
 public:
  explicit DeviceCheck(const c10::OperatorName& name)
      : name_(name),
        off_(kTakesTensorsOfBoth.count(c10::toString(name)) + kTakesTensorsOfBoth.count(name.name)) {}

  void operator()(const at::Tensor& tensor) {
    if (off_ || !tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0)) return;
    TORCH_CHECK(
        !seen_ || *seen_ == tensor.device(), name_,
        ": Expected all tensors to be on the same device, but found at least two devices, ", *seen_, " and ",
        tensor.device(), "!");
    seen_ = tensor.device();
  }

 private:
  const c10::OperatorName& name_;
  bool off_;
  std::optional<c10::Device> seen_;
};

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t first = stack->size() - schema.arguments().size();
  Call call;
  DeviceCheck check(schema.operator_name());
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    c10::IValue& value = (*stack)[first + i];
    value = map_tensors(value, [&](const at::Tensor& tensor) {
      check(tensor);
      return call.host(tensor);
    });
  }
  for (size_t i = 0; i < schema.arguments().size(); ++i) {  // the device on which to make the result
    c10::IValue& value = (*stack)[first + i];
    if (!value.isDevice()) continue;
    value.toDevice().is_cuda() ? call.make_on(value.toDevice()) : call.make_on_host();
    value = c10::Device(c10::kCPU);
  }
  {
    c10::impl::ExcludeDispatchKeyGuard below(
        c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    (*stack)[i] = map_tensors((*stack)[i], [&](const at::Tensor& tensor) { return call.device(tensor); });
  }
  call.take_over_metadata();
}

void write_into(const c10::IValue& target, const c10::IValue& source) {
  std::vector<at::Tensor> values;
  map_tensors(source, [&](const at::Tensor& tensor) { return values.emplace_back(tensor); });
  size_t i = 0;
  map_tensors(target, [&](const at::Tensor& tensor) {
    const at::Tensor& value = values[i++];
    if (tensor.defined() && tensor.storage().data() != value.storage().data()) {
      tensor_of(on(c10::kCPU, tensor.storage()), tensor)
          .copy_(tensor_of(on(c10::kCPU, value.storage()), value));
    }
    return tensor;
  });
}

}  // namespace

namespace {

// A view of the storage that does not keep it alive. Deferred work must not keep memory that the program has
// freed.
c10::Storage borrowed(const c10::Storage& storage) {
  auto* data = const_cast<void*>(storage.data());
  return {
      c10::Storage::use_byte_size_t{}, storage.nbytes(), c10::DataPtr(data, storage.device()), nullptr,
      false};
}

// The arguments of an op that runs later. Host memory that it reads is copied now, as CUDA does with pageable
// memory.
torch::jit::Stack arguments_for_later(const torch::jit::Stack& given, bool writes_to_host) {
  torch::jit::Stack later;
  for (size_t i = 0; i < given.size(); ++i) {
    later.push_back(map_tensors(given[i], [&](const at::Tensor& tensor) {
      if (!tensor.defined() || !tensor.has_storage()) return tensor;
      if (tensor.is_cuda()) return tensor_of(borrowed(tensor.storage()), tensor);
      return writes_to_host && i == 0 ? tensor : tensor.detach().clone();
    }));
  }
  return later;
}

// The same memory without autograd's data, which a graph does not keep.
torch::jit::Stack without_autograd(torch::jit::Stack values) {
  for (c10::IValue& value : values) {
    value = map_tensors(value, [](const at::Tensor& tensor) {
      return tensor.defined() && tensor.is_cuda() && tensor.has_storage()
          ? tensor_of(tensor.storage(), tensor)
          : tensor;
    });
  }
  return values;
}

// Returns the name under which an op waits for the device, or an empty string if it does not wait.
std::string wait_of(const std::string& name, const torch::jit::Stack& given) {
  if (kWaits.count(name)) return name;
  if (name != "aten::copy_") return "";
  const at::Tensor &target = given[0].toTensor(), &source = given[1].toTensor();
  const bool between = target.is_cuda() != source.is_cuda();
  return between && !given[2].toBool() ? "copy_ between the host and the device" : "";
}

void run_late(const c10::OperatorHandle& op, torch::jit::Stack* stack, const torch::jit::Stack& given) {
  const bool to_host = op.schema().name() == "aten::copy_" && !given[0].toTensor().is_cuda();
  const torch::jit::Stack later = arguments_for_later(given, to_host);
  without_effect([&] { run(op, stack); });
  const torch::jit::Stack results =
      arguments_for_later({stack->end() - op.schema().returns().size(), stack->end()}, true);
  if (to_host) {
    const at::Tensor target = given[0].toTensor();
    std::memset(target.mutable_data_ptr(), 0xFF, target.nbytes());
  }
  submit(current_stream(), [op, later, results] {
    torch::jit::Stack again(later);
    run(op, &again);
    for (size_t i = 0; i < results.size(); ++i) write_into(results[i], again[i]);
  });
}

}  // namespace

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t taken = op.schema().arguments().size(), returned = op.schema().returns().size();
  const torch::jit::Stack given(stack->end() - taken, stack->end());
  if (const std::string what = wait_of(op.schema().name(), given); !what.empty()) {
    check_may_wait(what);
    wait_for(now_on(current_stream()));
    return run(op, stack);
  }
  if (!capturing()) return works_late() ? run_late(op, stack, given) : run(op, stack);
  const torch::jit::Stack recorded = without_autograd(given);
  run(op, stack);
  const torch::jit::Stack results(stack->end() - returned, stack->end());
  record([op, recorded, results = without_autograd(results)] {
    torch::jit::Stack again(recorded);
    run(op, &again);
    for (size_t i = 0; i < results.size(); ++i) write_into(results[i], again[i]);
  });
}

namespace {

at::Tensor noted(at::Tensor tensor) {
  made(tensor.storage());
  return tensor;
}

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(device_at(-1)));
  const c10::DispatchKeySet key(c10::DispatchKey::CUDA);
  return noted(at::detail::empty_generic(size, allocator(), key, dtype.value_or(at::kFloat), format));
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(device_at(-1)));
  const c10::DispatchKeySet key(c10::DispatchKey::CUDA);
  return noted(at::detail::empty_strided_generic(size, stride, allocator(), key, dtype.value_or(at::kFloat)));
}

at::Tensor zero_tensor(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  static std::array<at::native::ZeroTensorAllocator, kDevices> nothing{device_at(0), device_at(1)};
  const c10::Device where = device_at(device ? device->index() : -1);
  const c10::DispatchKeySet keys({c10::DispatchKey::CUDA, c10::DispatchKey::ZeroTensor});
  return at::detail::empty_generic(
      size, &nothing[where.index()], keys, dtype.value_or(at::kFloat), std::nullopt);
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  found(source);
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  c10::impl::VirtualGuardImpl(c10::kCUDA).recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

// CUDA's softmax can read float16 and write float32 in one op. The CPU's cannot.
template <auto by_host>
at::Tensor softmax(const at::Tensor& self, int64_t dim, bool half_to_float) {
  const at::Tensor input = half_to_float ? self.to(at::kFloat) : self;
  at::Tensor result = at::empty_like(input, at::MemoryFormat::Contiguous);
  return by_host(result, input, dim, false);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_efficientzerotensor", &zero_tensor);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("record_stream", &record_stream);
  library.impl("_softmax", &softmax<&at::_softmax_out>);
  library.impl("_log_softmax", &softmax<&at::_log_softmax_out>);
  auto by_host = [&](const std::string& name) {
    library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  };
  by_host("copy_");  // torch's own kernel calls a function that only CUDA builds have
  // Every op with a CPU kernel gets one for CUDA. Otherwise torch would decompose it.
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || name.getNamespace() != "aten" || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) by_host(c10::toString(name));
  }
}

}  // namespace host_device
