#include <ATen/core/DimVector.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
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

// Tells whether one of some dictionaries may have changed since it was asked last.
class DictWatch {
 public:
  void Add(const py::dict& dict);
  bool HasChanged();

 private:
#if PY_VERSION_HEX >= 0x030C0000
  inline static uint64_t all_changes = 0;  // of what anybody watches: there is hardly one
  uint64_t changes_seen_ = 0;
#else
  std::vector<std::pair<PyDictObject*, uint64_t> > versions_;
#endif
};

#if PY_VERSION_HEX >= 0x030C0000
void DictWatch::Add(const py::dict& dict) {
  static const int watcher =
      PyDict_AddWatcher([](PyDict_WatchEvent, PyObject*, PyObject*, PyObject*) -> int {
        ++all_changes;
        return 0;
      });
  // Never given back: others may watch the dictionary too, and a change costs next to nothing.
  if (watcher < 0 || PyDict_Watch(watcher, dict.ptr()) < 0) throw py::error_already_set();
}

bool DictWatch::HasChanged() { return std::exchange(changes_seen_, all_changes) != all_changes; }
#else
void DictWatch::Add(const py::dict& dict) {
  versions_.emplace_back(reinterpret_cast<PyDictObject*>(dict.ptr()), 0);
}

bool DictWatch::HasChanged() {
  bool changed = false;
  for (auto& [dict, version] : versions_) {
    changed |= std::exchange(version, dict->ma_version_tag) != version;
  }
  return changed;
}
#endif

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
    for (const py::dict& owned : attributes_) dicts_.Add(owned);
  }

  // What of the modules may change from call to call: which of them are in training, and which
  // tensors require gradients. nullopt if one has moved: a value was added or removed, is another
  // object, or is a tensor of other memory.
  std::optional<py::bytes> Flags() {
    const bool may_have_changed = dicts_.HasChanged();
    if (may_have_changed || !flags_ || !IsAsSeen()) Look();
    return flags_;
  }

  // For Python's garbage collector: a module may have a runner that watches what the module is of.
  int Visit(visitproc visit, void* arg) const {
    for (const Home& home : homes_) Py_VISIT(home.dict.ptr());
    for (const Value& value : values_) Py_VISIT(value.object.ptr());
    for (const py::dict& attributes : attributes_) Py_VISIT(attributes.ptr());
    return 0;
  }
  void Clear() {
    dicts_ = {};
    std::vector<Home>().swap(homes_);
    std::vector<Value>().swap(values_);
    std::vector<py::dict>().swap(attributes_);
  }

 private:
  struct Home {
    py::dict dict;
    std::size_t size;
  };
  struct Value {
    py::object object;  // kept, so that no other one can have its place
    // Of a tensor, in its object; the storage is kept for the same reason.
    const at::Tensor* tensor = nullptr;
    const c10::TensorImpl* impl = nullptr;  // to be fetched
    c10::Storage storage = {};              // none of what has no memory of its own
    const void* data = nullptr;
    c10::ScalarType dtype = c10::ScalarType::Undefined;
    at::DimVector sizes = {};
    at::DimVector strides = {};
    bool requires_grad = false;

    void Fetch() const {
      if (tensor == nullptr) return;
      __builtin_prefetch(tensor);
      cgp::Fetch(impl, sizeof(c10::TensorImpl));
      cgp::Fetch(storage.unsafeGetStorageImpl(), sizeof(c10::StorageImpl));
    }
    bool IsElsewhere() const {
      if (tensor == nullptr) return false;
      if (!tensor->has_storage()) return static_cast<bool>(storage);
      return tensor->const_data_ptr() != data || tensor->scalar_type() != dtype ||
             tensor->sizes() != sizes || tensor->strides() != strides;
    }
  };

  // Whether all tensors are where they were seen last, and require gradients or not as then.
  bool IsAsSeen() const {
    for (std::size_t i = 0; i < values_.size(); ++i) {
      if (i + kAhead < values_.size()) values_[i + kAhead].Fetch();
      const Value& value = values_[i];
      if (value.IsElsewhere()) return false;
      if (value.tensor && value.tensor->requires_grad() != value.requires_grad) return false;
    }
    return true;
  }

  void Look() {
    std::string flags;
    flags_.reset();
    if (!AppendGradients(flags)) return;
    for (const py::dict& attributes : attributes_) {
      PyObject* const trains = PyDict_GetItem(attributes.ptr(), training_.ptr());
      flags += trains == Py_True ? 't' : 'e';
    }
    flags_ = py::bytes(flags);
  }

  // Returns whether no value has moved.
  bool AppendGradients(std::string& flags) {
    std::size_t next = 0;
    for (const Home& home : homes_) {
      if (home.dict.size() != home.size) return false;
      for (const auto& [name, value] : home.dict) {
        Value& known = values_[next++];
        if (value.ptr() != known.object.ptr() || known.IsElsewhere()) return false;
        if (!known.tensor) continue;
        known.requires_grad = known.tensor->requires_grad();
        flags += known.requires_grad ? 'g' : '-';
      }
    }
    return true;
  }

  void Note(const py::dict& home, bool has_tensors) {
    dicts_.Add(home);
    homes_.push_back({home, home.size()});
    for (const auto& [name, value] : home) {
      Value& known = values_.emplace_back();
      known.object = py::reinterpret_borrow<py::object>(value);
      if (!has_tensors || value.is_none()) continue;
      const at::Tensor& tensor = THPVariable_Unpack(value.ptr());
      known.tensor = &tensor;
      if (!tensor.has_storage()) continue;
      known.impl = tensor.unsafeGetTensorImpl();
      known.storage = tensor.storage();
      known.data = tensor.const_data_ptr();
      known.dtype = tensor.scalar_type();
      known.sizes = tensor.sizes();
      known.strides = tensor.strides();
    }
  }

  DictWatch dicts_;
  std::vector<Home> homes_;
  std::vector<Value> values_;  // of the homes, one after the other
  std::vector<py::dict> attributes_;
  std::optional<py::bytes> flags_;  // as they were seen last
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
