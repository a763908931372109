// The gradients of a list of parameters, looked up without Python code: which are there, which have
// changed since they were last looked at, and all of them to one kernel.
//
// Each call is given the list. Between calls the ledger holds neither parameters nor gradients: a second
// reference to either would stop torch.utils.swap_tensors.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../cpu_ops.h"
#include "../cuda_gradients.h"
#include "../op_calls.h"
#include "../tensor_memory.h"
#include "local_gradient.h"
#include "tensors.h"

namespace amp_plugin {
namespace {

using cuda::GradientTable;
using python::GradientBlock;
using python::visit_blocks;
using python::visit_gradients;
using List = const py::list&;

enum Change : int64_t { kGone = -1, kSame = 0, kChanged = 1, kNew = 2 };

// A gradient as it was seen: where its memory is, and its version. The weak reference keeps the
// address of the memory's owner from being used again.
struct Mark {
  c10::weak_intrusive_ptr<c10::intrusive_ptr_target> owner{c10::intrusive_ptr<c10::intrusive_ptr_target>()};
  const void* address = nullptr;
  int64_t offset = 0;
  uint32_t version = 0;
};

uint32_t version_of(const at::Tensor& tensor) {
  c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();  // without autograd's virtual call
  return impl.is_inference() ? 0 : impl.version_counter().current_version();
}

int64_t offset_of(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return impl.has_storage() && !impl.has_symbolic_sizes_strides() ? impl.storage_offset() : 0;
}

// The storage; of a tensor that has none (sparse ones) the tensor itself.
c10::intrusive_ptr_target* owner_of(const at::Tensor& tensor) {
  if (tensor.has_storage()) return tensor.storage().unsafeGetStorageImpl();
  return tensor.unsafeGetTensorImpl();
}

void mark(Mark& mark, const at::Tensor& grad) {
  c10::intrusive_ptr_target* owner = owner_of(grad);
  if (mark.address != owner) {
    mark.owner = c10::weak_intrusive_ptr<c10::intrusive_ptr_target>(
        c10::intrusive_ptr<c10::intrusive_ptr_target>::unsafe_reclaim_from_nonowning(owner));
    mark.address = owner;
  }
  mark.offset = offset_of(grad);
  mark.version = version_of(grad);
}

bool is_supported(at::ScalarType type) {
  return type == at::kFloat || type == at::kHalf || type == at::kBFloat16 || type == at::kDouble ||
      type == at::kComplexFloat || type == at::kComplexDouble;
}

// Below autograd, which records nothing here and would box and look at every gradient.
template <auto function, typename... Arguments>
auto call(const char* name, const std::vector<at::Tensor>& grads, const Arguments&... arguments) {
  const py::gil_scoped_release others_may_run;
  const at::AutoDispatchBelowAutograd below;
  return call_op<function>(name, grads, arguments...);
}

// Whether a call may also go past the dispatcher: no mode, tracer or transform takes ops, no profiler counts
// them.
bool nobody_watches() {
  const c10::DispatchKeySet included = c10::impl::tls_local_dispatch_key_set().included_;
  return (included - c10::default_included_set).empty() &&
      !at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION).has_value();
}

std::vector<at::Tensor> gradients(List params) {
  std::vector<at::Tensor> grads;
  grads.reserve(params.size());
  visit_gradients(params, [&](size_t /*i*/, const at::Tensor& grad) {
    if (grad.defined()) grads.push_back(local_part(grad));
    return true;
  });
  return grads;
}

// Gradients without references of their own, which cost two atomic operations a tensor. Good while the
// GIL is held: parameters keep their gradients, and nobody replaces those during a call.
class BorrowedGradients {
 public:
  explicit BorrowedGradients(size_t most)
      : memory_(std::make_unique_for_overwrite<std::byte[]>(most * sizeof(at::Tensor))) {}

  void add(const at::Tensor& grad) {
    new (reinterpret_cast<at::Tensor*>(memory_.get()) + count_)
        at::Tensor(c10::MaybeOwnedTraits<at::Tensor>::createBorrow(grad));  // never destroyed
    ++count_;
  }

  at::TensorList tensors() const { return {reinterpret_cast<const at::Tensor*>(memory_.get()), count_}; }

 private:
  std::unique_ptr<std::byte[]> memory_;
  size_t count_ = 0;
};

struct Known {
  BorrowedGradients grads;
  std::unique_ptr<GradientTable> table;  // null where the op has to be called
};

// The parameters' own gradients, all there and plain. No table if one is not so, or has moved.
Known known_whole(List params, const at::Tensor& scale) {
  Known known{.grads = BorrowedGradients(params.size()), .table = nullptr};
  const bool same = visit_blocks(params, [&](size_t begin, const GradientBlock& grads, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      if (!grads[i]->defined()) return false;
      known.grads.add(*grads[i]);
    }
    if (begin == 0) known.table = GradientTable::kept(params.size(), *grads[0], scale);
    return known.table != nullptr && known.table->are_same(begin, grads.data(), count);
  });
  if (!same) known.table = nullptr;
  return known;
}

// The gradients that there are, of DTensors this rank's part.
Known known_parts(List params, const at::Tensor& scale) {
  Known known{.grads = BorrowedGradients(params.size()), .table = nullptr};
  visit_gradients(params, [&](size_t /*i*/, const at::Tensor& grad) {
    if (grad.defined()) known.grads.add(local_part(grad));
    return true;
  });
  const at::TensorList grads = known.grads.tensors();
  if (!grads.empty()) known.table = GradientTable::kept(grads.size(), grads[0], scale);
  for (size_t i = 0; known.table != nullptr && i < grads.size(); ++i) {
    const at::Tensor* grad = &grads[i];
    if (!known.table->are_same(i, &grad, 1)) known.table = nullptr;
  }
  return known;
}

// Launches on gradients on a GPU that have not moved, past the dispatcher, which would read each once more.
// `launch` takes them; no result where the op has to be called.
template <typename Launch>
auto launched(List params, const at::Tensor& scale, bool writes, const Launch& launch)
    -> std::optional<decltype(launch(std::declval<const GradientTable&>()))> {
  if (!scale.is_cuda() || !nobody_watches()) return std::nullopt;
  Known known = known_whole(params, scale);
  if (known.table == nullptr) known = known_parts(params, scale);
  if (known.table == nullptr) return std::nullopt;
  if (writes) increment_versions(known.grads.tensors());
  const py::gil_scoped_release others_may_run;  // a launch waits where the device is far behind
  return launch(*known.table);
}

class GradientLedger {
 public:
  int64_t count(List params) const {
    int64_t present = 0;
    visit_gradients(params, [&](size_t /*i*/, const at::Tensor& grad) {
      present += grad.defined();
      return true;
    });
    return present;
  }

  void remember(List params, int64_t slot) {
    std::vector<Mark>& marks = marks_[slot];
    marks.resize(params.size());
    visit_gradients(params, [&](size_t i, const at::Tensor& grad) {
      if (grad.defined())
        mark(marks[i], grad);
      else
        marks[i] = Mark{};
      return true;
    });
  }

  int64_t compare(List params, int64_t slot) const {
    const auto found = marks_.find(slot);
    int64_t worst = kSame;
    const bool in_place = visit_gradients(params, [&](size_t i, const at::Tensor& grad) {
      const Mark* seen = found == marks_.end() ? nullptr : &found->second.at(i);
      if (!grad.defined()) {
        if (seen != nullptr && seen->address != nullptr && worst == kSame) worst = kGone;
      } else if (seen == nullptr || seen->address != owner_of(grad) || seen->offset != offset_of(grad)) {
        return false;
      } else if (seen->version != version_of(grad)) {
        worst = kChanged;
      }
      return true;
    });
    return in_place ? worst : kNew;
  }

  // A ledger of the parameters at these positions, with all that was noted of them.
  GradientLedger split(const std::vector<int64_t>& positions) const {
    GradientLedger part;
    for (const auto& [slot, marks] : marks_) {
      for (const int64_t position : positions)
        part.marks_[slot].push_back(marks.at(static_cast<size_t>(position)));
    }
    return part;
  }

  // The one device of all gradients if one kernel can take them all, and which parameters have one
  // (None if all have). No device if there are none, or if they need to be looked at one by one.
  std::pair<std::optional<c10::Device>, std::optional<std::vector<int64_t>>> survey(List params) const {
    const at::Tensor* first = nullptr;
    std::vector<int64_t> present;
    const bool alike = visit_gradients(params, [&](size_t i, const at::Tensor& grad) {
      if (!grad.defined()) return true;
      if (!is_plain(grad) || !is_supported(grad.scalar_type()) ||
          (first != nullptr && first->device() != grad.device()))
        return false;
      if (first == nullptr) first = &grad;
      present.push_back(static_cast<int64_t>(i));
      return true;
    });
    if (!alike || first == nullptr) return {};
    if (present.size() == params.size()) return {first->device(), std::nullopt};
    return {first->device(), std::move(present)};
  }

  // All gradients by device and by how they are sharded: (DTensor spec or None, device, positions) for each
  // kind, in the order of the first of each. None if one is neither plain nor a DTensor around plain memory.
  std::optional<py::list> survey_shards(List all) const {
    std::vector<ShardGroup> groups;
    python::Tensors params(all);
    for (size_t i = 0; i < params.size(); ++i) {
      const at::Tensor& grad = params[i].unsafeGetTensorImpl()->grad();
      if (!grad.defined()) continue;
      Sharding sharding;
      if (!is_plain(grad)) {
        std::optional<Sharding> found = sharding_of(grad);
        if (!found) return std::nullopt;
        sharding = std::move(*found);
      }
      const at::Tensor& part = local_part(grad);
      if (!is_plain(part) || !is_supported(part.scalar_type())) return std::nullopt;
      group_of(groups, std::move(sharding), part.device()).positions.push_back(static_cast<int64_t>(i));
    }
    py::list found;
    for (const ShardGroup& group : groups) {
      const py::object spec = group.sharding.spec ? group.sharding.spec : py::none();
      found.append(py::make_tuple(spec, group.device, group.positions));
    }
    return found;
  }

  int64_t first_float16(List params) const {
    int64_t position = -1;
    visit_gradients(params, [&](size_t i, const at::Tensor& grad) {
      if (grad.defined() && grad.scalar_type() == at::kHalf) position = static_cast<int64_t>(i);
      return position < 0;
    });
    return position;
  }

  // The positions of parameters with a hook that runs once their gradient is there, and may take it away.
  std::vector<int64_t> hooked(List all) const {
    std::vector<int64_t> positions;
    python::Tensors params(all);
    for (size_t i = 0; i < params.size(); ++i) {
      const bool is_known = params[i].unsafeGetTensorImpl()->autograd_meta() != nullptr;
      if (is_known && torch::autograd::impl::post_acc_grad_hooks(params[i]) != nullptr)
        positions.push_back(static_cast<int64_t>(i));
    }
    return positions;
  }

  // unscale_ if it writes, else norm_check.
  template <bool writes>
  Measured measure(List params, const at::Tensor& inv_scale, double p, bool is_scale) const {
    const auto found = launched(params, inv_scale, writes, [&](const GradientTable& known) {
      return known.measure(writes, inv_scale, p, is_scale);
    });
    if (found) return *found;
    if constexpr (writes)
      return call<unscale_>("amp_plugin::unscale_", gradients(params), inv_scale, p, is_scale);
    else
      return call<norm_check>("amp_plugin::norm_check", gradients(params), inv_scale, p, is_scale);
  }

  at::Tensor multiply(List params, const at::Tensor& factor) const {
    const auto found =
        launched(params, factor, true, [&](const GradientTable& known) { return known.multiply_(factor); });
    return found ? *found : call<multiply_>("amp_plugin::multiply_", gradients(params), factor);
  }

 private:
  std::unordered_map<int64_t, std::vector<Mark>> marks_;
};

}  // namespace

void add_gradient_ledger(py::module_& module) {
  using namespace pybind11::literals;
  py::class_<GradientLedger>(module, "GradientLedger")
      .def(py::init<>())
      .def("count", &GradientLedger::count)
      .def("remember", &GradientLedger::remember)
      .def("compare", &GradientLedger::compare)
      .def("split", &GradientLedger::split)
      .def("survey", &GradientLedger::survey)
      .def("survey_shards", &GradientLedger::survey_shards)
      .def("first_float16", &GradientLedger::first_float16)
      .def("hooked", &GradientLedger::hooked)
      .def(
          "norm_check", &GradientLedger::measure<false>, "params"_a, "inv_scale"_a, "p"_a,
          "is_scale"_a = false)
      .def("unscale_", &GradientLedger::measure<true>, "params"_a, "inv_scale"_a, "p"_a, "is_scale"_a = false)
      .def("multiply_", &GradientLedger::multiply);
}

}  // namespace amp_plugin
