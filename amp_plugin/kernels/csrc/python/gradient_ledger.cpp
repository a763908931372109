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
#include "../known_gradients.h"
#include "../op_calls.h"
#include "../plain_tensor.h"
#include "../versions.h"
#include "binding.h"
#include "gradient_blocks.h"
#include "local_gradient.h"

namespace amp_plugin {
namespace {

using Measured = KnownGradients::Measured;
using python::List;
using python::Owned;
using python::to_python;

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

const at::Tensor& param_at(List params, size_t i, python::ExpectTensors& tensors) {
  tensors.expect(params[i]);
  return python::tensor_of(params[i]);
}

const at::Tensor& grad_of(const at::Tensor& param) { return param.unsafeGetTensorImpl()->grad(); }

// Below autograd, which records nothing here and would box and look at every gradient.
template <typename Op, typename... Arguments>
auto call(const Op& op, const std::vector<at::Tensor>& grads, const Arguments&... arguments) {
  const python::WithoutGil others_may_run;
  const at::AutoDispatchBelowAutograd below;
  return op(grads, arguments...);
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
  std::unique_ptr<KnownGradients> table;  // null where the op has to be called
};

// The parameters' own gradients, all there and plain. No table if one is not so, or has moved.
Known known_whole(List params, const at::Tensor& scale) {
  Known known{.grads = BorrowedGradients(params.size()), .table = nullptr};
  const bool same = visit_blocks(params, [&](size_t begin, const GradientBlock& grads, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      if (!grads[i]->defined()) return false;
      known.grads.add(*grads[i]);
    }
    if (begin == 0) known.table = known_gradients(params.size(), *grads[0], scale);
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
  if (!grads.empty()) known.table = known_gradients(grads.size(), grads[0], scale);
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
    -> std::optional<decltype(launch(std::declval<const KnownGradients&>()))> {
  if (!scale.is_cuda() || !op_calls::nobody_watches()) return std::nullopt;
  Known known = known_whole(params, scale);
  if (known.table == nullptr) known = known_parts(params, scale);
  if (known.table == nullptr) return std::nullopt;
  if (writes) increment_versions(known.grads.tensors());
  const python::WithoutGil others_may_run;  // a launch waits where the device is far behind
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
    const bool alike = visit_gradients(params, [&](size_t i, const at::Tensor& grad) {
      if (!grad.defined()) return true;
      if (!is_plain(grad) || !is_supported(grad.scalar_type()) ||
          (first != nullptr && first->device() != grad.device()))
        return false;
      if (first == nullptr) first = &grad;
      present.push_back(static_cast<int64_t>(i));
      return true;
    });
    if (!alike || first == nullptr) return {python::none(), python::none()};
    const bool has_all = present.size() == params.size();
    return {python::owned(THPDevice_New(first->device())), has_all ? python::none() : to_python(present)};
  }

  // All gradients by device and by how they are sharded: (DTensor spec or None, device, positions) for each
  // kind, in the order of the first of each. None if one is neither plain nor a DTensor around plain memory.
  Owned survey_shards(List params) const {
    std::vector<ShardGroup> groups;
    python::ExpectTensors tensors;
    for (size_t i = 0; i < params.size(); ++i) {
      const at::Tensor& grad = grad_of(param_at(params, i, tensors));
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
    int64_t position = -1;
    visit_gradients(params, [&](size_t i, const at::Tensor& grad) {
      if (grad.defined() && grad.scalar_type() == at::kHalf) position = static_cast<int64_t>(i);
      return position < 0;
    });
    return position;
  }

  // The positions of parameters with a hook that runs once their gradient is there, and may take it away.
  std::vector<int64_t> hooked(List params) const {
    std::vector<int64_t> positions;
    python::ExpectTensors tensors;
    for (size_t i = 0; i < params.size(); ++i) {
      if (has_post_accumulate_hooks(param_at(params, i, tensors)))
        positions.push_back(static_cast<int64_t>(i));
    }
    return positions;
  }

  Measured norm_check(
      List params, const at::Tensor& inv_scale, double norm_type, std::optional<bool> is_scale) const {
    return measure(op_calls::norm_check, false, params, inv_scale, norm_type, is_scale.value_or(false));
  }

  Measured unscale_(
      List params, const at::Tensor& inv_scale, double norm_type, std::optional<bool> is_scale) const {
    return measure(op_calls::unscale_, true, params, inv_scale, norm_type, is_scale.value_or(false));
  }

  at::Tensor multiply_(List params, const at::Tensor& factor) const {
    const auto found =
        launched(params, factor, true, [&](const KnownGradients& known) { return known.multiply_(factor); });
    return found ? *found : call(op_calls::multiply_, gradients(params), factor);
  }

 private:
  static Measured measure(
      decltype(op_calls::norm_check)& op, bool writes, List params, const at::Tensor& inv_scale,
      double norm_type, bool is_scale) {
    const auto found = launched(params, inv_scale, writes, [&](const KnownGradients& known) {
      return known.measure(writes, inv_scale, norm_type, is_scale);
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
