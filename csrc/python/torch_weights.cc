#include "python/torch_weights.h"

#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace py = pybind11;

namespace cgp {
namespace {

// The modules that a graph was captured with, by the dictionaries in which they register their parts,
// buffers and parameters. In C++ because a model has hundreds of these, and a replay should cost
// microseconds.
class WeightWatch {
 public:
  // pre: the values are None, and tensors in `tensor_homes`; `attributes` are those of modules.
  WeightWatch(const std::vector<py::dict>& homes, const std::vector<py::dict>& tensor_homes,
              const std::vector<py::dict>& attributes)
      : attributes_(attributes) {
    for (const py::dict& home : homes) Note(home, /*has_tensors=*/false);
    for (const py::dict& home : tensor_homes) Note(home, /*has_tensors=*/true);
  }

  // Whether a value was added or removed, is another object, or is a tensor of other memory.
  bool Moved() const {
    std::size_t next = 0;
    for (const Home& home : homes_) {
      if (home.dict.size() != home.size) return true;
      for (const auto& [name, value] : home.dict) {
        const Value& known = values_[next++];
        if (value.ptr() != known.object.ptr()) return true;
        if (home.has_tensors && IsElsewhere(known, value.ptr())) return true;
      }
    }
    return false;
  }

  // What of the modules may change from call to call: which of them are in training, and which
  // tensors require gradients.
  py::bytes Flags() const {
    std::string flags;
    flags.reserve(attributes_.size() + values_.size());
    for (const py::dict& module : attributes_) {
      PyObject* const trains = PyDict_GetItem(module.ptr(), training_.ptr());
      flags += trains == Py_True ? 't' : 'e';
    }
    for (const Value& known : values_) {
      if (known.storage)
        flags += THPVariable_Unpack(known.object.ptr()).requires_grad() ? 'g' : '-';
    }
    return flags;
  }

  // For Python's garbage collector: a module may have a runner that watches what the module is of.
  int Visit(visitproc visit, void* arg) const {
    for (const Home& home : homes_) Py_VISIT(home.dict.ptr());
    for (const Value& value : values_) Py_VISIT(value.object.ptr());
    for (const py::dict& attributes : attributes_) Py_VISIT(attributes.ptr());
    return 0;
  }
  void Clear() {
    std::vector<Home>().swap(homes_);
    std::vector<Value>().swap(values_);
    std::vector<py::dict>().swap(attributes_);
  }

 private:
  struct Home {
    py::dict dict;
    std::size_t size;
    bool has_tensors;
  };
  struct Value {
    py::object object;  // kept, so that no other one can have its place
    // Of a tensor; the storage is kept for the same reason.
    c10::Storage storage = {};
    const void* data = nullptr;
    c10::ScalarType dtype = c10::ScalarType::Undefined;
    std::vector<int64_t> sizes = {};
    std::vector<int64_t> strides = {};
  };

  void Note(const py::dict& home, bool has_tensors) {
    homes_.push_back({home, home.size(), has_tensors});
    for (const auto& [name, value] : home) {
      Value& known = values_.emplace_back();
      known.object = py::reinterpret_borrow<py::object>(value);
      const at::Tensor* const tensor = has_tensors ? TensorOf(value.ptr()) : nullptr;
      if (tensor == nullptr) continue;
      known.storage = tensor->storage();
      known.data = tensor->const_data_ptr();
      known.dtype = tensor->scalar_type();
      known.sizes = tensor->sizes().vec();
      known.strides = tensor->strides().vec();
    }
  }

  // nullptr for None, and for what has no memory of its own.
  static const at::Tensor* TensorOf(PyObject* tensor_or_none) {
    if (tensor_or_none == Py_None) return nullptr;
    const at::Tensor& tensor = THPVariable_Unpack(tensor_or_none);
    return tensor.has_storage() ? &tensor : nullptr;
  }
  static bool IsElsewhere(const Value& known, PyObject* now) {
    const at::Tensor* const tensor = TensorOf(now);
    if (tensor == nullptr) return static_cast<bool>(known.storage);
    return tensor->const_data_ptr() != known.data || tensor->scalar_type() != known.dtype ||
           tensor->sizes() != c10::IntArrayRef(known.sizes) ||
           tensor->strides() != c10::IntArrayRef(known.strides);
  }

  std::vector<Home> homes_;
  std::vector<Value> values_;  // of the homes, one after the other
  std::vector<py::dict> attributes_;
  py::str training_{"training"};
};

// pybind11 leaves circles to whoever binds a class.
void LetCirclesBeFound(PyHeapTypeObject* heap_type) {
  PyTypeObject* const type = &heap_type->ht_type;
  type->tp_flags |= Py_TPFLAGS_HAVE_GC;
  type->tp_traverse = [](PyObject* self, visitproc visit, void* arg) -> int {
    Py_VISIT(Py_TYPE(self));
    if (!py::detail::is_holder_constructed(self)) return 0;
    return py::cast<const WeightWatch&>(py::handle(self)).Visit(visit, arg);
  };
  type->tp_clear = [](PyObject* self) -> int {
    py::cast<WeightWatch&>(py::handle(self)).Clear();
    return 0;
  };
}

}  // namespace

void BindWeights(py::module_& m) {
  py::class_<WeightWatch>(m, "WeightWatch", py::custom_type_setup(&LetCirclesBeFound))
      .def(py::init<const std::vector<py::dict>&, const std::vector<py::dict>&,
                    const std::vector<py::dict>&>(),
           py::arg("homes"), py::arg("tensor_homes"), py::arg("attributes"))
      .def("moved", &WeightWatch::Moved)
      .def("flags", &WeightWatch::Flags);
}

}  // namespace cgp
