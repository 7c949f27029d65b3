#include <ATen/core/grad_mode.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/Layout.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "python/torch_parts.h"
#include "python/torch_replays.h"
#include "python/torch_weights.h"

namespace py = pybind11;

// Of ATen/autocast_mode.h, which includes all of ATen's operators: a quarter of the adapter's
// compile time.
namespace at::autocast {
TORCH_API bool is_autocast_enabled(at::DeviceType device_type);
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
}  // namespace at::autocast

namespace cgp {
namespace {

void Append(std::string& key, c10::IntArrayRef extents) {
  key.append(reinterpret_cast<const char*>(extents.data()), extents.size() * sizeof(int64_t));
}

// Each of a tensor's numbers is of one byte but for its extents, whose number comes first.
void Append(std::string& key, const at::Tensor& tensor) {
  const c10::Device device = tensor.device();
  key += {static_cast<char>(tensor.dim()), static_cast<char>(tensor.scalar_type()),
          static_cast<char>(device.type()), static_cast<char>(device.index()),
          static_cast<char>(tensor.requires_grad())};
  Append(key, tensor.sizes());
  Append(key, tensor.strides());
}

bool IsStrided(const at::Tensor& tensor) {
  return tensor.layout() == c10::kStrided && !tensor.is_nested();
}

// Neither a tensor's class nor its layout is in a key: there is one of each. Nor whether gradients
// are batched, by torch.autograd.grad(is_grads_batched=True) within which a call comes.
bool IsPlain(py::handle argument) {
  if (!THPVariable_CheckExact(argument.ptr())) return false;
  const at::Tensor& tensor = THPVariable_Unpack(argument.ptr());
  return IsStrided(tensor) &&
         !tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Batched);
}

// The tensors among the leaves of a call, and bytes: equal for calls whose tensors are alike in all
// but what they hold.
py::tuple ShapesOf(const py::sequence& leaves) {
  py::list tensors;
  std::string key;
  for (const py::handle leaf : leaves) {
    if (!THPVariable_Check(leaf.ptr())) continue;
    const at::Tensor& tensor = THPVariable_Unpack(leaf.ptr());
    if (!IsStrided(tensor)) {
      std::ostringstream message;
      message << "an argument is a tensor with layout " << tensor.layout()
              << "; a graph's must be strided";
      throw py::type_error(message.str());
    }
    if (!THPVariable_CheckExact(leaf.ptr())) {
      throw py::type_error("an argument is a " + std::string(Py_TYPE(leaf.ptr())->tp_name) +
                           "; the function would be given a plain tensor: pass one, and make the "
                           "other within the function");
    }
    Append(key, tensor);
    tensors.append(leaf);
  }
  return py::make_tuple(std::move(tensors), py::bytes(key));
}

// Reads calls whose arguments are tensors, as nearly all are, in one go. In C++ since a replay
// costs microseconds, and would wait for the interpreter.
class CallReader {
 public:
  CallReader(const std::string& device, bool sort_keywords)
      : device_(c10::Device(device).type()), sort_keywords_(sort_keywords) {}

  // The tensors, and bytes: equal for calls that are alike in all but what the tensors hold, among
  // them the modes that decide what a function does with them, and the flags of its modules. None
  // for any other call, where weights have moved, and within a transform of torch.func,
  // forward-mode differentiation or a trace.
  py::object Read(WeightWatch& weights, const py::tuple& args, const py::dict& kwargs) const {
    py::list tensors;
    const std::optional<py::bytes> key = KeyOf(weights, args, kwargs, &tensors);
    return key ? py::object(py::make_tuple(std::move(tensors), *key)) : py::none();
  }

  // The leaves of what a call returns that one of `known`, by key, replays as it is, behind what
  // assembles them. nullopt for others.
  std::optional<std::pair<py::object, py::list>> Run(WeightWatch& weights, const py::dict& known,
                                                     Row& row, const py::tuple& args,
                                                     const py::dict& kwargs, bool copy) const {
    if (known.empty()) return std::nullopt;
    py::list tensors;
    const std::optional<py::bytes> key = KeyOf(weights, args, kwargs, &tensors);
    if (!key) return std::nullopt;
    PyObject* const found = PyDict_GetItemWithError(known.ptr(), key->ptr());
    if (found == nullptr) return std::nullopt;
    const auto kept = py::reinterpret_borrow<py::object>(found);
    return kept.cast<Replays&>().RunAt(row, tensors, copy);
  }

 private:
  std::optional<py::bytes> KeyOf(WeightWatch& weights, const py::tuple& args,
                                 const py::dict& kwargs, py::list* tensors) const {
    for (const auto mode :
         {c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::Tracer}) {
      if (c10::impl::tls_is_dispatch_key_included(mode)) return std::nullopt;
    }
    if (torch::autograd::ForwardADLevel::try_get_by_idx(0)) return std::nullopt;
    const bool casts = at::autocast::is_autocast_enabled(device_);
    std::string key{static_cast<char>(at::GradMode::is_enabled()),
                    static_cast<char>(casts ? at::autocast::get_autocast_dtype(device_)
                                            : at::ScalarType::Undefined)};
    AppendNumber(key, args.size());
    const auto add = [&](py::handle argument) {
      if (!IsPlain(argument)) return false;
      Append(key, THPVariable_Unpack(argument.ptr()));
      tensors->append(argument);
      return true;
    };
    for (const py::handle argument : args) {
      if (!add(argument)) return std::nullopt;
    }
    for (const auto& [name, argument] : Named(kwargs)) {
      AppendNumber(key, name.size());
      key += name;
      if (name.empty() || !add(argument)) return std::nullopt;
    }
    // Last, since they take longest. They have one length as long as these weights are watched.
    const std::optional<py::bytes> flags = weights.Flags();
    if (!flags) return std::nullopt;
    return py::bytes(key + std::string(*flags));
  }

  static void AppendNumber(std::string& key, std::size_t number) {
    key.append(reinterpret_cast<const char*>(&number), sizeof(number));
  }

  // A name that UTF-8 does not have is empty.
  std::vector<std::pair<std::string_view, py::handle>> Named(const py::dict& kwargs) const {
    std::vector<std::pair<std::string_view, py::handle>> named;
    for (const auto& [name, argument] : kwargs) {
      Py_ssize_t size = 0;
      const char* const text = PyUnicode_AsUTF8AndSize(name.ptr(), &size);
      if (text == nullptr) PyErr_Clear();
      named.emplace_back(std::string_view(text, static_cast<std::size_t>(size)), argument);
    }
    // As Python sorts them: UTF-8 has the order of code points.
    if (sort_keywords_) std::ranges::sort(named, {}, [](const auto& entry) { return entry.first; });
    return named;
  }

  c10::DeviceType device_;
  bool sort_keywords_;
};

}  // namespace

void BindCalls(py::module_& m) {
  m.def("shapes_of", &ShapesOf, py::arg("leaves"));
  py::class_<CallReader>(m, "CallReader")
      .def(py::init<const std::string&, bool>(), py::arg("device"), py::arg("sort_keywords"))
      .def("read", &CallReader::Read, py::arg("weights"), py::arg("args"), py::arg("kwargs"))
      .def("run", &CallReader::Run, py::arg("weights"), py::arg("known"), py::arg("row"),
           py::arg("args"), py::arg("kwargs"), py::arg("copy"));
}

}  // namespace cgp
