// The gradients of a list of parameters, looked up without Python code: which are there, which have
// changed since they were last looked at, and all of them to one kernel.
//
// Each call is given the list. Between calls the ledger holds neither parameters nor gradients: a second
// reference to either would stop torch.utils.swap_tensors.

#include "gradient_ledger.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../autograd_node.h"
#include "../cuda_gradients.h"
#include "binding.h"
#include "direct_call.h"
#include "local_gradient.h"

namespace amp_plugin {
namespace {

using cuda::Measured;
using python::List;
using python::Owned;
using python::to_python;
using Measures = Measured(at::TensorList, const at::Tensor&, double, bool);

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

const at::Tensor& param_at(List params, size_t i) { return python::tensor_of(params[i]); }

const at::Tensor& grad_of(const at::Tensor& param) { return param.unsafeGetTensorImpl()->grad(); }

// Below autograd, which records nothing here and would box and look at every gradient.
template <typename Op, typename... Arguments>
auto call(const Op& op, const std::vector<at::Tensor>& grads, const Arguments&... arguments) {
  const python::WithoutGil others_may_run;
  const at::AutoDispatchBelowAutograd below;
  return op.call(grads, arguments...);
}

std::vector<at::Tensor> gradients(List params) {
  std::vector<at::Tensor> grads;
  grads.reserve(params.size());
  for (size_t i = 0; i < params.size(); ++i) {
    const at::Tensor& grad = grad_of(param_at(params, i));
    if (grad.defined()) grads.push_back(local_part(grad));
  }
  return grads;
}

// The gradients without references of their own, which cost two atomic operations a tensor. Good while the
// GIL is held: parameters keep their gradients, and nobody replaces those during a call.
class BorrowedGradients {
 public:
  explicit BorrowedGradients(List params)
      : memory_(std::make_unique_for_overwrite<std::byte[]>(params.size() * sizeof(at::Tensor))) {
    auto* next = reinterpret_cast<at::Tensor*>(memory_.get());
    for (size_t i = 0; i < params.size(); ++i) {
      const at::Tensor& grad = grad_of(param_at(params, i));
      if (!grad.defined()) continue;
      new (next++)
          at::Tensor(c10::MaybeOwnedTraits<at::Tensor>::createBorrow(local_part(grad)));  // never destroyed
      ++count_;
    }
  }

  at::TensorList tensors() const { return {reinterpret_cast<const at::Tensor*>(memory_.get()), count_}; }

 private:
  std::unique_ptr<std::byte[]> memory_;
  size_t count_ = 0;
};

// Launches on gradients on a GPU that have not moved, past the dispatcher, which would read each once more.
// `launch` takes the table; no result where the op has to be called.
template <typename Launch>
auto launched(List params, const at::Tensor& scale, bool writes, const Launch& launch)
    -> std::optional<decltype(launch(std::declval<const cuda::GradientTable&>()))> {
  if (!scale.is_cuda() || !nobody_watches_ops()) return std::nullopt;
  const BorrowedGradients grads(params);
  const auto table = cuda::GradientTable::kept(grads.tensors(), scale);
  if (!table) return std::nullopt;
  if (writes) cuda::increment_versions(grads.tensors());
  const python::WithoutGil others_may_run;  // a launch waits where the device is far behind
  return launch(*table);
}

class GradientLedger {
 public:
  int64_t count(List params) const {
    int64_t present = 0;
    for (size_t i = 0; i < params.size(); ++i) present += grad_of(param_at(params, i)).defined();
    return present;
  }

  void remember(List params, int64_t slot) {
    std::vector<Mark>& marks = marks_[slot];
    marks.resize(params.size());
    for (size_t i = 0; i < params.size(); ++i) {
      const at::Tensor& grad = grad_of(param_at(params, i));
      if (grad.defined())
        mark(marks[i], grad);
      else
        marks[i] = Mark{};
    }
  }

  int64_t compare(List params, int64_t slot) const {
    const auto found = marks_.find(slot);
    int64_t worst = kSame;
    for (size_t i = 0; i < params.size(); ++i) {
      const Mark* seen = found == marks_.end() ? nullptr : &found->second.at(i);
      const at::Tensor& grad = grad_of(param_at(params, i));
      if (!grad.defined()) {
        if (seen != nullptr && seen->address != nullptr && worst == kSame) worst = kGone;
      } else if (seen == nullptr || seen->address != owner_of(grad) || seen->offset != offset_of(grad)) {
        return kNew;
      } else if (seen->version != version_of(grad)) {
        worst = kChanged;
      }
    }
    return worst;
  }

  // A ledger of the parameters at these positions, with all that was noted of them.
  Owned split(const std::vector<int64_t>& positions) const {
    GradientLedger part;
    for (const auto& [slot, marks] : marks_) {
      for (const int64_t position : positions)
        part.marks_[slot].push_back(marks.at(static_cast<size_t>(position)));
    }
    return python::new_object(std::move(part));
  }

  // The one device of all gradients if one kernel can take them all, and which parameters have one
  // (None if all have). No device if there are none, or if they need to be looked at one by one.
  std::tuple<Owned, Owned> survey(List params) const {
    const at::Tensor* first = nullptr;
    std::vector<int64_t> present;
    for (size_t i = 0; i < params.size(); ++i) {
      const at::Tensor& grad = grad_of(param_at(params, i));
      if (!grad.defined()) continue;
      if (!is_plain(grad) || !is_supported(grad.scalar_type()) ||
          (first != nullptr && first->device() != grad.device()))
        return {python::none(), python::none()};
      if (first == nullptr) first = &grad;
      present.push_back(static_cast<int64_t>(i));
    }
    if (first == nullptr) return {python::none(), python::none()};
    const bool has_all = present.size() == params.size();
    return {python::owned(THPDevice_New(first->device())), has_all ? python::none() : to_python(present)};
  }

  // All gradients by device and by how they are sharded: (DTensor spec or None, device, positions) for each
  // kind, in the order of the first of each. None if one is neither plain nor a DTensor around plain memory.
  Owned survey_shards(List params) const {
    std::vector<ShardGroup> groups;
    for (size_t i = 0; i < params.size(); ++i) {
      const at::Tensor& grad = grad_of(param_at(params, i));
      if (!grad.defined()) continue;
      Sharding sharding;
      if (!is_plain(grad)) {
        std::optional<Sharding> found = sharding_of(grad);
        if (!found) return python::none();
        sharding = std::move(*found);
      }
      const at::Tensor& part = local_part(grad);
      if (!is_plain(part) || !is_supported(part.scalar_type())) return python::none();
      group_of(groups, std::move(sharding), part.device()).positions.push_back(static_cast<int64_t>(i));
    }
    return to_python(groups);
  }

  int64_t first_half(List params) const {
    for (size_t i = 0; i < params.size(); ++i) {
      const at::Tensor& grad = grad_of(param_at(params, i));
      if (grad.defined() && grad.scalar_type() == at::kHalf) return static_cast<int64_t>(i);
    }
    return -1;
  }

  // The positions of parameters with a hook that runs once their gradient is there, and may take it away.
  std::vector<int64_t> hooked(List params) const {
    std::vector<int64_t> positions;
    for (size_t i = 0; i < params.size(); ++i) {
      if (has_post_accumulate_hooks(param_at(params, i))) positions.push_back(static_cast<int64_t>(i));
    }
    return positions;
  }

  Measured norm_check(
      List params, const at::Tensor& inv_scale, double norm_type, std::optional<bool> is_scale) const {
    static const auto op = find_op<Measures>("amp_plugin::norm_check");
    return measure(op, cuda::kNormCheck, params, inv_scale, norm_type, is_scale.value_or(false));
  }

  Measured unscale_(
      List params, const at::Tensor& inv_scale, double norm_type, std::optional<bool> is_scale) const {
    static const auto op = find_op<Measures>("amp_plugin::unscale_");
    return measure(op, cuda::kUnscale, params, inv_scale, norm_type, is_scale.value_or(false));
  }

  at::Tensor multiply_(List params, const at::Tensor& factor) const {
    static const auto op = find_op<at::Tensor(at::TensorList, const at::Tensor&)>("amp_plugin::multiply_");
    const auto found = launched(
        params, factor, true, [&](const cuda::GradientTable& table) { return table.multiply_(factor); });
    return found ? *found : call(op, gradients(params), factor);
  }

 private:
  static Measured measure(
      const c10::TypedOperatorHandle<Measures>& op, size_t kernel, List params, const at::Tensor& inv_scale,
      double norm_type, bool is_scale) {
    const bool writes = kernel == cuda::kUnscale;
    const auto found = launched(params, inv_scale, writes, [&](const cuda::GradientTable& table) {
      return table.measure(kernel, inv_scale, norm_type, is_scale);
    });
    return found ? *found : call(op, gradients(params), inv_scale, norm_type, is_scale);
  }

  std::unordered_map<int64_t, std::vector<Mark>> marks_;
};

}  // namespace
}  // namespace amp_plugin

bool add_gradient_ledger(PyObject* module) {
  using Ledger = amp_plugin::GradientLedger;
  using namespace amp_plugin::python;
  static PyMethodDef methods[] = {
      method<Ledger, &Ledger::count>("count"),
      method<Ledger, &Ledger::remember>("remember"),
      method<Ledger, &Ledger::compare>("compare"),
      method<Ledger, &Ledger::split>("split"),
      method<Ledger, &Ledger::survey>("survey"),
      method<Ledger, &Ledger::survey_shards>("survey_shards"),
      method<Ledger, &Ledger::first_half>("first_half"),
      method<Ledger, &Ledger::hooked>("hooked"),
      method<Ledger, &Ledger::norm_check>("norm_check"),
      method<Ledger, &Ledger::unscale_>("unscale_"),
      method<Ledger, &Ledger::multiply_>("multiply_"),
      {},
  };
  return add_class<Ledger>(module, "amp_plugin.kernels._region.GradientLedger", methods);
}
