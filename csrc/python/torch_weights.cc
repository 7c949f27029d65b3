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
  static int AddWatcher();
  static int Watcher();

  inline static uint64_t all_changes = 0;  // of what anybody watches: there is hardly one
  uint64_t changes_seen_ = 0;
#else
  std::vector<std::pair<PyDictObject*, uint64_t> > versions_;
#endif
};

#if PY_VERSION_HEX >= 0x030C0000
// -1 where changes are not told: an interpreter has eight watchers, which others may have taken; and
// that of Python 3.13.0 is not told of attributes (CPython's gh-125608).
int DictWatch::AddWatcher() {
  const int watcher = PyDict_AddWatcher([](PyDict_WatchEvent, PyObject*, PyObject*, PyObject*) {
    ++all_changes;
    return 0;
  });
  if (watcher < 0) {
    PyErr_Clear();
    return -1;
  }
  const py::object probe = py::module_::import("torch").attr("nn").attr("Module")();
  if (PyDict_Watch(watcher, probe.attr("__dict__").ptr()) < 0) throw py::error_already_set();
  const uint64_t before = all_changes;
  probe.attr("training") = false;
  return all_changes != before ? watcher : -1;
}

int DictWatch::Watcher() {
  static const int watcher = AddWatcher();
  return watcher;
}

void DictWatch::Add(const py::dict& dict) {
  // Never given back: others may watch the dictionary too, and a change costs next to nothing.
  if (Watcher() >= 0 && PyDict_Watch(Watcher(), dict.ptr()) < 0) throw py::error_already_set();
}

bool DictWatch::HasChanged() {
  return Watcher() < 0 || std::exchange(changes_seen_, all_changes) != all_changes;
}
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

// Equal for tensors of the same type, place in their storage, sizes and strides. The tensors of a model
// are compared with themselves as they were: one that differs meets the same number in one of 2^64 cases.
// A polynomial, whose powers do not wait for what they are multiplied with. They must not be in a line:
// then transposed tensors could be equal, as (1, 64) with strides (64, 1) and (64, 1) with (1, 64).
uint64_t ShapeOf(const c10::TensorImpl& tensor) {
  constexpr uint64_t kBase = 0x9E3779B97F4A7C15U;
  uint64_t power = 1;
  uint64_t mixed = 0;
  const auto mix = [&](uint64_t number) {
    power *= kBase;
    mixed += number * power;
  };
  mix(static_cast<uint64_t>(c10::typeMetaToScalarType(tensor.dtype())));
  mix(static_cast<uint64_t>(tensor.dim()));
  mix(static_cast<uint64_t>(tensor.storage_offset()));
  for (const int64_t extent : tensor.sizes()) mix(static_cast<uint64_t>(extent));
  for (const int64_t stride : tensor.strides()) mix(static_cast<uint64_t>(stride));
  return mixed;
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
    for (const py::dict& owned : attributes_) dicts_.Add(owned);
  }

  // What of the modules may change from call to call: which of them are in training, and which
  // tensors require gradients. nullopt if one has moved: a value was added or removed, is another
  // object, or is a tensor of other memory.
  std::optional<py::bytes> Flags() {
    if (dicts_.HasChanged() || !flags_) Look();
    for (std::size_t i = 0; flags_ && i < tensors_.size(); ++i) {
      if (i + kAhead < tensors_.size()) tensors_[i + kAhead].Fetch();
      if (tensors_[i].IsLeft()) return std::nullopt;
      if (tensors_[i].tensor->requires_grad() != tensors_[i].requires_grad) NoteFlags();
    }
    return flags_;
  }

  // For Python's garbage collector: a module may have a runner that watches what the module is of.
  int Visit(visitproc visit, void* arg) const {
    for (const Home& home : homes_) Py_VISIT(home.dict.ptr());
    for (const py::object& value : values_) Py_VISIT(value.ptr());
    for (const py::dict& attributes : attributes_) Py_VISIT(attributes.ptr());
    return 0;
  }
  void Clear() {
    dicts_ = {};
    tensors_.clear();
    std::vector<Home>().swap(homes_);
    std::vector<py::object>().swap(values_);
    std::vector<py::dict>().swap(attributes_);
  }

 private:
  struct Home {
    py::dict dict;
    std::size_t size;
  };
  static const c10::StorageImpl* StorageOf(const c10::TensorImpl& tensor) {
    return tensor.unsafe_storage().unsafeGetStorageImpl();
  }
  // Where a tensor was. Small, since all of them are looked at in each call.
  struct Place {
    const at::Tensor* tensor;                       // in its object
    const c10::TensorImpl* impl;                    // to be fetched, as the next
    const torch::autograd::AutogradMeta* autograd;  // nullptr of what never required gradients
    const c10::StorageImpl* storage;                // nullptr of what has no memory of its own
    const void* data = nullptr;
    uint64_t shape = 0;
    bool requires_grad = false;

    explicit Place(const at::Tensor& given)
        : tensor(&given),
          impl(given.unsafeGetTensorImpl()),
          autograd(static_cast<torch::autograd::AutogradMeta*>(impl->autograd_meta())),
          storage(StorageOf(*impl)) {
      if (storage == nullptr) return;
      data = storage->data();
      shape = ShapeOf(*impl);
    }
    bool IsLeft() const {
      const c10::TensorImpl& now = *tensor->unsafeGetTensorImpl();
      const c10::StorageImpl* const lies_in = StorageOf(now);
      if (lies_in == nullptr || storage == nullptr) return lies_in != storage;
      return lies_in->data() != data || ShapeOf(now) != shape;
    }
    void Fetch() const {
      __builtin_prefetch(tensor);
      cgp::Fetch(impl, sizeof(c10::TensorImpl));
      __builtin_prefetch(storage);
      if (autograd == nullptr) return;
      __builtin_prefetch(autograd);
      __builtin_prefetch(&autograd->requires_grad_);
    }
  };

  // After a change of dictionaries: whether they have the same values.
  void Look() {
    flags_.reset();
    std::size_t next = 0;
    for (const Home& home : homes_) {
      if (home.dict.size() != home.size) return;
      for (const auto& [name, value] : home.dict) {
        if (value.ptr() != values_[next++].ptr()) return;
      }
    }
    NoteFlags();
  }

  void NoteFlags() {
    std::string flags;
    for (Place& place : tensors_) {
      place.requires_grad = place.tensor->requires_grad();
      flags += place.requires_grad ? 'g' : '-';
    }
    for (const py::dict& attributes : attributes_) {
      flags += PyDict_GetItem(attributes.ptr(), training_.ptr()) == Py_True ? 't' : 'e';
    }
    flags_ = py::bytes(flags);
  }

  void Note(const py::dict& home, bool has_tensors) {
    dicts_.Add(home);
    homes_.push_back({home, home.size()});
    for (const auto& [name, value] : home) {
      values_.push_back(py::reinterpret_borrow<py::object>(value));
      if (!has_tensors || value.is_none()) continue;
      const at::Tensor& tensor = THPVariable_Unpack(value.ptr());
      tensors_.emplace_back(tensor);
      if (tensor.has_storage()) storages_.push_back(tensor.storage());
    }
  }

  DictWatch dicts_;
  std::vector<Place> tensors_;
  std::vector<Home> homes_;
  // Kept, so that nothing else can have their places.
  std::vector<py::object> values_;  // of the homes, one after the other
  std::vector<c10::Storage> storages_;
  std::vector<py::dict> attributes_;
  std::optional<py::bytes> flags_;  // as they were last; nullopt if there are other values
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
