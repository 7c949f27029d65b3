#include <ATen/core/DimVector.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "python/torch_parts.h"

namespace py = pybind11;

namespace cgp {
namespace {

// How far ahead what will be looked at is fetched into the cache. Between two calls the rest of a program
// pushes hundreds of objects out of it, and to wait for each of them in turn would cost 0.2 ms.
constexpr std::size_t kAhead = 6;
constexpr std::size_t kCacheLine = 64;

void Fetch(const void* begin, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += kCacheLine) {
    __builtin_prefetch(static_cast<const char*>(begin) + at);
  }
}

// Whoever looks something up in it reads it, its keys, and what stands behind these.
void FetchDict(PyObject* dict) { Fetch(dict, sizeof(PyDictObject)); }
void FetchKeys(PyObject* dict) {
  Fetch(reinterpret_cast<const PyDictObject*>(dict)->ma_keys, 3 * kCacheLine);
}

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

  // What of the modules may change from call to call: which of them are in training, and which
  // tensors require gradients. nullopt if one has moved: a value was added or removed, is another
  // object, or is a tensor of other memory.
  std::optional<py::bytes> Flags() const {
    std::string flags;
    flags.reserve(attributes_.size() + values_.size());
    if (!AppendGradients(flags)) return std::nullopt;
    for (std::size_t i = 0; i < attributes_.size(); ++i) {
      if (i + 2 * kAhead < attributes_.size()) FetchDict(attributes_[i + 2 * kAhead].ptr());
      if (i + kAhead < attributes_.size()) FetchKeys(attributes_[i + kAhead].ptr());
      PyObject* const trains = PyDict_GetItem(attributes_[i].ptr(), training_.ptr());
      flags += trains == Py_True ? 't' : 'e';
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
    const c10::TensorImpl* tensor = nullptr;  // to be fetched
    c10::Storage storage = {};
    const void* data = nullptr;
    c10::ScalarType dtype = c10::ScalarType::Undefined;
    at::DimVector sizes = {};
    at::DimVector strides = {};

    void Fetch() const {
      __builtin_prefetch(object.ptr());
      if (tensor == nullptr) return;
      cgp::Fetch(tensor, sizeof(c10::TensorImpl));
      cgp::Fetch(storage.unsafeGetStorageImpl(), sizeof(c10::StorageImpl));
    }
  };

  // Returns whether no value has moved.
  bool AppendGradients(std::string& flags) const {
    std::size_t next = 0;
    for (std::size_t i = 0; i < homes_.size(); ++i) {
      const Home& home = homes_[i];
      if (i + 2 * kAhead < homes_.size()) FetchDict(homes_[i + 2 * kAhead].dict.ptr());
      if (i + kAhead < homes_.size()) FetchKeys(homes_[i + kAhead].dict.ptr());
      if (home.dict.size() != home.size) return false;
      for (const auto& [name, value] : home.dict) {
        if (next + kAhead < values_.size()) values_[next + kAhead].Fetch();
        const Value& known = values_[next++];
        if (value.ptr() != known.object.ptr()) return false;
        if (home.has_tensors && IsElsewhere(known, value.ptr())) return false;
        if (known.storage) flags += THPVariable_Unpack(value.ptr()).requires_grad() ? 'g' : '-';
      }
    }
    return true;
  }

  void Note(const py::dict& home, bool has_tensors) {
    homes_.push_back({home, home.size(), has_tensors});
    for (const auto& [name, value] : home) {
      Value& known = values_.emplace_back();
      known.object = py::reinterpret_borrow<py::object>(value);
      const at::Tensor* const tensor = has_tensors ? TensorOf(value.ptr()) : nullptr;
      if (tensor == nullptr) continue;
      known.tensor = tensor->unsafeGetTensorImpl();
      known.storage = tensor->storage();
      known.data = tensor->const_data_ptr();
      known.dtype = tensor->scalar_type();
      known.sizes = tensor->sizes();
      known.strides = tensor->strides();
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
           tensor->sizes() != known.sizes || tensor->strides() != known.strides;
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
      .def("flags", &WeightWatch::Flags);
}

}  // namespace cgp
