// The gradients of a list of parameters, looked up without Python: which are there, which have changed
// since they were last looked at, and all of them to one kernel.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace amp_plugin {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using Measured = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

enum Change : int64_t { kGone = -1, kSame = 0, kChanged = 1, kNew = 2 };

// A gradient as it was seen. The weak reference keeps its address from being used again.
struct Mark {
  c10::weak_intrusive_ptr<c10::TensorImpl> tensor{c10::intrusive_ptr<c10::TensorImpl>()};
  c10::TensorImpl* address = nullptr;
  uint32_t version = 0;
};

uint32_t version_of(c10::TensorImpl& tensor) {
  return tensor.is_inference() ? 0 : tensor.version_counter().current_version();
}

bool is_supported(at::ScalarType type) {
  return type == at::kFloat || type == at::kHalf || type == at::kBFloat16 || type == at::kDouble ||
      type == at::kComplexFloat || type == at::kComplexDouble;
}

// Whether a kernel may take the tensor as it is: strided memory, no wrapper and no lazy bit around it.
bool is_plain(const at::Tensor& tensor) {
  static const DispatchKeySet special(
      {DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::Conjugate, DispatchKey::Negative,
       DispatchKey::ZeroTensor, DispatchKey::Functionalize, DispatchKey::FuncTorchGradWrapper,
       DispatchKey::FuncTorchBatched});
  return tensor.layout() == at::kStrided && !tensor.is_nested() && !tensor.key_set().has_any(special) &&
      is_supported(tensor.scalar_type());
}

class GradientLedger : public torch::CustomClassHolder {
 public:
  explicit GradientLedger(std::vector<at::Tensor> params) : params_(std::move(params)) {}

  int64_t count() const {
    return std::count_if(
        params_.begin(), params_.end(), [](const at::Tensor& p) { return grad_of(p).defined(); });
  }

  void remember(int64_t slot) {
    std::vector<Mark>& marks = marks_[slot];
    marks.resize(params_.size());
    for (size_t i = 0; i < params_.size(); ++i) {
      const at::Tensor& grad = grad_of(params_[i]);
      if (!grad.defined()) {
        marks[i] = Mark{};
        continue;
      }
      c10::TensorImpl* address = grad.unsafeGetTensorImpl();
      if (marks[i].address != address) {
        marks[i].tensor = c10::weak_intrusive_ptr<c10::TensorImpl>(grad.getIntrusivePtr());
        marks[i].address = address;
      }
      marks[i].version = version_of(*address);
    }
  }

  void forget(int64_t slot) { marks_.erase(slot); }

  int64_t compare(int64_t slot) const {
    const auto found = marks_.find(slot);
    int64_t worst = kSame;
    for (size_t i = 0; i < params_.size(); ++i) {
      const at::Tensor& grad = grad_of(params_[i]);
      if (!grad.defined()) {
        const bool gone = found != marks_.end() && found->second[i].address != nullptr;
        worst = gone && worst == kSame ? static_cast<int64_t>(kGone) : worst;
        continue;
      }
      c10::TensorImpl* address = grad.unsafeGetTensorImpl();
      if (found == marks_.end() || found->second[i].address != address) {
        return kNew;
      }
      if (found->second[i].version != version_of(*address)) {
        worst = kChanged;
      }
    }
    return worst;
  }

  // The one device of all gradients if one kernel can take them all, and which parameters have one
  // (nothing if all have). No device if there are none, or if they need to be looked at one by one.
  std::tuple<std::optional<at::Device>, std::optional<std::vector<int64_t>>> survey() const {
    std::optional<at::Device> device;
    std::vector<int64_t> present;
    bool all = true;
    for (size_t i = 0; i < params_.size(); ++i) {
      const at::Tensor& grad = grad_of(params_[i]);
      if (!grad.defined()) {
        if (all) {
          all = false;
          present.resize(i);
          std::iota(present.begin(), present.end(), 0);
        }
        continue;
      }
      if (!is_plain(grad) || (device && *device != grad.device())) {
        return {std::nullopt, std::nullopt};
      }
      device = grad.device();
      if (!all) {
        present.push_back(static_cast<int64_t>(i));
      }
    }
    return {device, all ? std::nullopt : std::make_optional(std::move(present))};
  }

  int64_t first_half() const {
    const auto half = std::find_if(params_.begin(), params_.end(), [](const at::Tensor& p) {
      return grad_of(p).defined() && grad_of(p).scalar_type() == at::kHalf;
    });
    return half == params_.end() ? -1 : half - params_.begin();
  }

  // The calls go below autograd, which records nothing here and would box and look at every gradient.
  Measured norm_check(const at::Tensor& inv_scale, double norm_type) const {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("amp_plugin::norm_check", "")
                               .typed<Measured(at::TensorList, const at::Tensor&, double)>();
    const at::AutoDispatchBelowAutograd below;
    return op.call(gradients(), inv_scale, norm_type);
  }

  Measured unscale_(const at::Tensor& inv_scale, double norm_type) const {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("amp_plugin::unscale_", "")
                               .typed<Measured(at::TensorList, const at::Tensor&, double)>();
    const at::AutoDispatchBelowAutograd below;
    return op.call(gradients(), inv_scale, norm_type);
  }

  at::Tensor multiply_(const at::Tensor& factor) const {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("amp_plugin::multiply_", "")
                               .typed<at::Tensor(at::TensorList, const at::Tensor&)>();
    const at::AutoDispatchBelowAutograd below;
    return op.call(gradients(), factor);
  }

 private:
  static const at::Tensor& grad_of(const at::Tensor& param) { return param.unsafeGetTensorImpl()->grad(); }

  std::vector<at::Tensor> gradients() const {
    std::vector<at::Tensor> grads;
    grads.reserve(params_.size());
    for (const at::Tensor& param : params_) {
      if (grad_of(param).defined()) {
        grads.push_back(grad_of(param));
      }
    }
    return grads;
  }

  std::vector<at::Tensor> params_;
  std::unordered_map<int64_t, std::vector<Mark>> marks_;
};

}  // namespace
}  // namespace amp_plugin

TORCH_LIBRARY_FRAGMENT(amp_plugin, m) {
  m.class_<amp_plugin::GradientLedger>("GradientLedger")
      .def(torch::init<std::vector<at::Tensor>>())
      .def("count", &amp_plugin::GradientLedger::count)
      .def("remember", &amp_plugin::GradientLedger::remember)
      .def("forget", &amp_plugin::GradientLedger::forget)
      .def("compare", &amp_plugin::GradientLedger::compare)
      .def("survey", &amp_plugin::GradientLedger::survey)
      .def("first_half", &amp_plugin::GradientLedger::first_half)
      .def("norm_check", &amp_plugin::GradientLedger::norm_check)
      .def("unscale_", &amp_plugin::GradientLedger::unscale_)
      .def("multiply_", &amp_plugin::GradientLedger::multiply_);
}
