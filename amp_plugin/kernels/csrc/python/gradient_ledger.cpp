// The ledger of an optimizer's gradients: which loss scale each gradient carries. This file also collects
// gradients in the form that kernels take. None of this runs Python code.
//
// amp_plugin/scaling/ledger.py is the same class in Python, and explains it. Between calls a ledger holds no
// reference to a gradient, and refers to parameters only through the Python list. A second reference to a
// tensor would make torch.utils.swap_tensors fail.

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
using python::visit_gradients;
using List = const py::list&;

enum class Change { kSame, kWritten, kNew };  // kNew: the gradient is in other memory

// The memory and the version of a gradient when it was last looked at. The weak reference keeps the address
// of the memory's owner from being reused.
struct Mark {
  c10::weak_intrusive_ptr<c10::intrusive_ptr_target> owner{c10::intrusive_ptr<c10::intrusive_ptr_target>()};
  const void* address = nullptr;
  int64_t offset = 0;
  uint32_t version = 0;
};

uint32_t version_of(const at::Tensor& tensor) {
  c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();  // avoids autograd's virtual call
  return impl.is_inference() ? 0 : impl.version_counter().current_version();
}

int64_t offset_of(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return impl.has_storage() && !impl.has_symbolic_sizes_strides() ? impl.storage_offset() : 0;
}

// Returns the owner of a tensor's memory: its storage, or the tensor itself if it has no storage (sparse
// tensors).
c10::intrusive_ptr_target* owner_of(const at::Tensor& tensor) {
  if (tensor.has_storage()) return tensor.storage().unsafeGetStorageImpl();
  return tensor.unsafeGetTensorImpl();
}

void look(Mark& mark, const at::Tensor& grad) {
  if (!grad.defined()) {
    mark = Mark{};
    return;
  }
  c10::intrusive_ptr_target* owner = owner_of(grad);
  if (mark.address != owner) {
    mark.owner = c10::weak_intrusive_ptr<c10::intrusive_ptr_target>(
        c10::intrusive_ptr<c10::intrusive_ptr_target>::unsafe_reclaim_from_nonowning(owner));
    mark.address = owner;
  }
  mark.offset = offset_of(grad);
  mark.version = version_of(grad);
}

Change change_since(const Mark& mark, const at::Tensor& grad) {
  if (!grad.defined()) return mark.address == nullptr ? Change::kSame : Change::kWritten;
  if (mark.address != owner_of(grad) || mark.offset != offset_of(grad)) return Change::kNew;
  return mark.version == version_of(grad) ? Change::kSame : Change::kWritten;
}

// What is known about the gradient of one parameter. The ledgers of optimizers that share a parameter share
// its record.
struct Record {
  py::object carries;  // the loss scale that the gradient carries, or None
  Mark mark;
  int64_t used_at = -1;  // how many updates had been requested when an optimizer last used the gradient
  // The optimizers that have used the gradient since the last scaled backward pass began. The bool says
  // whether the optimizer has stepped since the gradient was last divided.
  std::vector<std::pair<int64_t, bool>> used_by;
  bool has_grown = false;  // a scaled backward pass has added to the gradient since it was last used

  bool is_changed(const at::Tensor& grad) const { return change_since(mark, grad) != Change::kSame; }
};

auto find_use(Record& record, int64_t optimizer) {
  return std::ranges::find(record.used_by, optimizer, &std::pair<int64_t, bool>::first);
}

bool is_supported(at::ScalarType type) { return cuda::code_of(type) != cuda::kUnknownDtype; }

// Calls an op below autograd. Autograd would record nothing here, but it would box and check every gradient.
template <auto function, typename... Arguments>
auto call(const char* name, const std::vector<at::Tensor>& grads, const Arguments&... arguments) {
  const py::gil_scoped_release others_may_run;
  const at::AutoDispatchBelowAutograd below;
  return call_op<function>(name, grads, arguments...);
}

// Return true if a call may bypass the dispatcher: no mode, tracer or transform intercepts ops, and no
// profiler counts them.
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

// Gradients that are borrowed, because a reference would cost two atomic operations per tensor. They are
// valid while the GIL is held: parameters keep their gradients, and nobody replaces gradients during a call.
class BorrowedGradients {
 public:
  explicit BorrowedGradients(size_t most)
      : memory_(std::make_unique_for_overwrite<std::byte[]>(most * sizeof(at::Tensor))) {}

  void add(const at::Tensor& grad) {
    new (reinterpret_cast<at::Tensor*>(memory_.get()) + count_)
        at::Tensor(c10::MaybeOwnedTraits<at::Tensor>::createBorrow(grad));  // borrowed, so never destroyed
    ++count_;
  }

  at::TensorList tensors() const { return {reinterpret_cast<const at::Tensor*>(memory_.get()), count_}; }

 private:
  std::unique_ptr<std::byte[]> memory_;
  size_t count_ = 0;
};

// Calls `launch` with the table of GPU gradients that have not moved. This bypasses the dispatcher, which
// would have to read every gradient. Returns nothing if the caller must call the op instead.
template <typename Launch>
auto launched(List params, const at::Tensor& scale, bool writes, const Launch& launch)
    -> std::optional<decltype(launch(std::declval<const GradientTable&>()))> {
  if (!scale.is_cuda() || !nobody_watches()) return std::nullopt;
  BorrowedGradients grads(params.size());
  visit_gradients(params, [&](size_t /*i*/, const at::Tensor& grad) {
    if (grad.defined()) grads.add(local_part(grad));
    return true;
  });
  const std::optional<GradientTable> table = GradientTable::kept(grads.tensors(), scale);
  if (!table) return std::nullopt;
  if (writes) increment_versions(grads.tensors());
  const py::gil_scoped_release others_may_run;  // a launch can block if the device is far behind
  return launch(*table);
}

class GradientLedger {
 public:
  // `params` are the parameters of an optimizer. Their records are taken from the `known` ledgers that have
  // them. A new record carries `scale`.
  GradientLedger(py::list params, const py::sequence& known, const py::object& scale)
      : params_(std::move(params)) {
    std::unordered_map<const PyObject*, std::shared_ptr<Record>> records;
    for (const py::handle& other : known) {
      const auto& ledger = other.cast<const GradientLedger&>();
      for (size_t i = 0; i < ledger.records_.size(); ++i)
        records.emplace(
            PyList_GET_ITEM(ledger.params_.ptr(), static_cast<Py_ssize_t>(i)), ledger.records_[i]);
    }
    records_.reserve(params_.size());
    for (const py::handle& param : params_) {
      std::shared_ptr<Record>& record = records[param.ptr()];
      if (record == nullptr) record = std::make_shared<Record>(Record{.carries = scale});
      records_.push_back(record);
    }
  }

  py::list params() const { return params_; }

  bool has_gradients() const {
    return !visit_gradients(params_, [](size_t /*i*/, const at::Tensor& grad) { return !grad.defined(); });
  }

  // Groups the parameters by the scale that their gradients carry. Parameters without a gradient are
  // included. Each group is (scale or None, parameters, whether a gradient was seen to change).
  py::list parts() const {
    struct Part {
      const py::object* scale;
      std::vector<size_t> positions;
      bool is_changed;
    };
    std::vector<Part> parts;
    visit_gradients(params_, [&](size_t i, const at::Tensor& grad) {
      const Record& record = *records_[i];
      auto part = std::ranges::find_if(parts, [&](const Part& p) { return p.scale->is(record.carries); });
      if (part == parts.end()) part = parts.insert(parts.end(), Part{&record.carries, {}, false});
      part->positions.push_back(i);
      part->is_changed |= grad.defined() && record.is_changed(grad);
      return true;
    });
    py::list found;
    for (const Part& part : parts) {
      py::list members = params_;
      if (parts.size() > 1) {
        members = py::list();
        for (const size_t i : part.positions) members.append(params_[i]);
      }
      found.append(py::make_tuple(*part.scale, members, part.is_changed));
    }
    return found;
  }

  void begin_backward(const py::object& scale) {
    each([&](Record& record, const at::Tensor& grad) {
      const bool goes_on = record.carries.is(scale) && record.used_by.empty();
      if (record.used_by.empty()) record.has_grown |= record.is_changed(grad);
      record.has_grown &= grad.defined();
      record.used_by.clear();
      if (!record.carries.is(scale)) record.carries = scale;
      if (!goes_on)
        look(record.mark, grad);  // else a change in an earlier pass of the same scale would be forgotten
    });
  }

  void carry_nothing(int64_t optimizer, int64_t updates, bool steps) {
    each([&](Record& record, const at::Tensor& grad) {
      if (!record.carries.is_none()) {
        record.carries = py::none();
        for (auto& [user, has_stepped] : record.used_by) has_stepped = false;
      }
      auto use = find_use(record, optimizer);
      if (use == record.used_by.end()) use = record.used_by.insert(use, {optimizer, false});
      use->second |= steps;
      record.used_at = updates;
      record.has_grown = false;
      look(record.mark, grad);
    });
  }

  bool assume_scaled(const py::object& scale, int64_t optimizer, int64_t updates) {
    bool any = false;
    each([&](Record& record, const at::Tensor& grad) {
      if (!record.carries.is_none() || record.used_at == updates) return;
      const auto use = find_use(record, optimizer);
      if (use == record.used_by.end()) return;
      const bool is_new = !grad.defined() || change_since(record.mark, grad) == Change::kNew;
      if (!is_new && !use->second) return;
      record.carries = scale;
      any |= grad.defined();
    });
    return any;
  }

  // Runs `write`, which multiplies gradients. A gradient that had changed before the call still counts as
  // changed.
  void write(const py::function& write) {
    std::vector<bool> is_same;
    is_same.reserve(records_.size());
    each([&](Record& record, const at::Tensor& grad) { is_same.push_back(!record.is_changed(grad)); });
    write();
    size_t i = 0;
    each([&](Record& record, const at::Tensor& grad) {
      if (is_same[i++]) look(record.mark, grad);
    });
  }

  void look_again() {
    each([](Record& record, const at::Tensor& grad) { look(record.mark, grad); });
  }

  bool waits() const {
    return any([](const Record& record, const at::Tensor& grad) {
      return grad.defined() && !record.carries.is_none() && (record.has_grown || record.is_changed(grad));
    });
  }

  bool has_grown() const {
    return any([](const Record& record, const at::Tensor& grad) {
      return record.has_grown || record.is_changed(grad);
    });
  }

  bool is_changed() const {
    return any([](const Record& record, const at::Tensor& grad) { return record.is_changed(grad); });
  }

  // Returns the device of all gradients if one kernel can take them all, and the positions of the parameters
  // that have one (None if all have). Returns no device if there is no gradient, or if the gradients must be
  // examined one by one.
  static std::pair<std::optional<c10::Device>, std::optional<std::vector<int64_t>>> survey(List params) {
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

  // Groups all gradients by device and sharding, in the order in which each group first appears. Each group
  // is (DTensor spec or None, device, positions). Returns None if a gradient is neither plain nor a DTensor
  // around plain memory.
  static std::optional<py::list> survey_shards(List all) {
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

  static int64_t first_float16(List params) {
    int64_t position = -1;
    visit_gradients(params, [&](size_t i, const at::Tensor& grad) {
      if (grad.defined() && grad.scalar_type() == at::kHalf) position = static_cast<int64_t>(i);
      return position < 0;
    });
    return position;
  }

  // Does unscale_ if `writes`, else norm_check.
  template <bool writes>
  static Measured measure(List params, const at::Tensor& inv_scale, double p, bool is_scale) {
    const auto found = launched(params, inv_scale, writes, [&](const GradientTable& known) {
      return known.measure(writes, inv_scale, p, is_scale);
    });
    if (found) return *found;
    constexpr const char* kOp = writes ? "amp_plugin::unscale_" : "amp_plugin::norm_check";
    return call<(writes ? unscale_ : norm_check)>(kOp, gradients(params), inv_scale, p, is_scale);
  }

  static at::Tensor multiply(
      List params, const at::Tensor& factor, std::optional<double> max_norm,
      const OptionalTensor& found_inf) {
    const auto found = launched(params, factor, true, [&](const GradientTable& known) {
      return known.multiply_(factor, max_norm, found_inf);
    });
    if (found) return *found;
    return call<multiply_>("amp_plugin::multiply_", gradients(params), factor, max_norm, found_inf);
  }

 private:
  template <typename Visit>
  void each(const Visit& visit) {
    visit_gradients(params_, [&](size_t i, const at::Tensor& grad) {
      visit(*records_[i], grad);
      return true;
    });
  }

  template <typename Holds>
  bool any(const Holds& holds) const {
    return !visit_gradients(
        params_, [&](size_t i, const at::Tensor& grad) { return !holds(*records_[i], grad); });
  }

  py::list params_;
  std::vector<std::shared_ptr<Record>> records_;
};

}  // namespace

void add_gradient_ledger(py::module_& module) {
  using namespace pybind11::literals;
  using Ledger = GradientLedger;
  py::class_<Ledger>(module, "GradientLedger")
      .def(py::init<py::list, py::sequence, py::object>(), "params"_a, "known"_a, "scale"_a)
      .def_property_readonly("params", &Ledger::params)
      .def("has_gradients", &Ledger::has_gradients)
      .def("parts", &Ledger::parts)
      .def("begin_backward", &Ledger::begin_backward)
      .def("carry_nothing", &Ledger::carry_nothing, "optimizer"_a, "updates"_a, "steps"_a)
      .def("assume_scaled", &Ledger::assume_scaled, "scale"_a, "optimizer"_a, "updates"_a)
      .def("write", &Ledger::write)
      .def("look_again", &Ledger::look_again)
      .def("waits", &Ledger::waits)
      .def("has_grown", &Ledger::has_grown)
      .def("is_changed", &Ledger::is_changed)
      .def_static("survey", &Ledger::survey)
      .def_static("survey_shards", &Ledger::survey_shards)
      .def_static("first_float16", &Ledger::first_float16)
      .def_static(
          "norm_check", &Ledger::measure<false>, "params"_a, "inv_scale"_a, "p"_a, "is_scale"_a = false)
      .def_static("unscale_", &Ledger::measure<true>, "params"_a, "inv_scale"_a, "p"_a, "is_scale"_a = false)
      .def_static(
          "multiply_", &Ledger::multiply, "params"_a, "factor"_a, "max_norm"_a = py::none(),
          "found_inf"_a = py::none());
}

}  // namespace amp_plugin
