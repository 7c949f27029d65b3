#include "python/torch_weights.h"

#include <ATen/core/DimVector.h>
#include <pybind11/stl.h>

#include <array>
#include <string>

#include "python/torch_parts.h"

namespace py = pybind11;

namespace cgp {
namespace {

// How far ahead what will be looked at is fetched into the cache. Between two calls the rest of a
// program pushes hundreds of objects out of it, and to wait for each of them in turn would cost 0.2
// ms.
constexpr std::size_t kAhead = 6;
constexpr std::size_t kCacheLine = 64;

void Fetch(const void* begin, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += kCacheLine) {
    __builtin_prefetch(static_cast<const char*>(begin) + at);
  }
}

// Of one odd number.
constexpr auto kPowers = [] {
  constexpr uint64_t kBase = 0x9E3779B97F4A7C15U;
  std::array<uint64_t, 3 + 2 * 64> powers{kBase};  // a tensor has no more than 64 dimensions
  for (std::size_t i = 1; i < powers.size(); ++i) powers[i] = powers[i - 1] * kBase;
  return powers;
}();

// Equal for tensors of the same type, place in their storage, sizes and strides. The tensors of a
// model are compared with themselves as they were: one that differs meets the same number in one of
// 2^64 cases. A polynomial, whose terms do not wait for each other. Its factors must not be in a
// line: then transposed tensors could be equal, as (1, 64) with strides (64, 1) and (64, 1) with
// (1, 64).
uint64_t ShapeOf(const c10::TensorImpl& tensor) {
  if (tensor.key_set().has(c10::DispatchKey::NestedTensor)) return 0;  // it has no sizes
  const uint64_t* power = kPowers.data();
  uint64_t mixed = static_cast<uint64_t>(c10::typeMetaToScalarType(tensor.dtype())) * *power++;
  mixed += static_cast<uint64_t>(tensor.dim()) * *power++;
  mixed += static_cast<uint64_t>(tensor.storage_offset()) * *power++;
  for (const int64_t extent : tensor.sizes()) mixed += static_cast<uint64_t>(extent) * *power++;
  for (const int64_t stride : tensor.strides()) mixed += static_cast<uint64_t>(stride) * *power++;
  return mixed;
}

const c10::StorageImpl* StorageOf(const c10::TensorImpl& tensor) {
  return tensor.unsafe_storage().unsafeGetStorageImpl();
}

const torch::autograd::AutogradMeta* AutogradOf(const c10::TensorImpl& tensor) {
  return static_cast<const torch::autograd::AutogradMeta*>(tensor.autograd_meta());
}

// As requires_grad(), which looks up where to ask.
bool RequiresGradients(const c10::TensorImpl& tensor) {
  const torch::autograd::AutogradMeta* const autograd = AutogradOf(tensor);
  return autograd != nullptr && (autograd->requires_grad_ || autograd->grad_fn_ != nullptr);
}

}  // namespace

#if PY_VERSION_HEX >= 0x030C0000
// -1 where changes are not told: an interpreter has eight watchers, which others may have taken;
// and that of Python 3.13.0 is not told of attributes (CPython's gh-125608).
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

WeightWatch::WeightWatch(const std::vector<py::dict>& homes,
                         const std::vector<py::dict>& tensor_homes,
                         const std::vector<py::dict>& attributes)
    : attributes_(attributes) {
  for (const py::dict& home : homes) Note(home, /*has_tensors=*/false);
  for (const py::dict& home : tensor_homes) Note(home, /*has_tensors=*/true);
  for (const py::dict& owned : attributes_) dicts_.Add(owned);
}

std::optional<py::bytes> WeightWatch::Flags() {
  if (dicts_.HasChanged() || !flags_) Look();
  for (std::size_t i = 0; flags_ && i < tensors_.size(); ++i) {
    if (i + kAhead < tensors_.size()) tensors_[i + kAhead].Fetch();
    const c10::TensorImpl& now = *tensors_[i].tensor->unsafeGetTensorImpl();
    if (tensors_[i].IsLeftBy(now)) return std::nullopt;
    if (RequiresGradients(now) != tensors_[i].requires_grad) NoteFlags();
  }
  return flags_;
}

int WeightWatch::Visit(visitproc visit, void* arg) const {
  for (const Home& home : homes_) Py_VISIT(home.dict.ptr());
  for (const py::object& value : values_) Py_VISIT(value.ptr());
  for (const py::dict& attributes : attributes_) Py_VISIT(attributes.ptr());
  return 0;
}

void WeightWatch::Clear() {
  dicts_ = {};
  tensors_.clear();
  std::vector<Home>().swap(homes_);
  std::vector<py::object>().swap(values_);
  std::vector<py::dict>().swap(attributes_);
}

WeightWatch::Place::Place(const at::Tensor& given)
    : tensor(&given),
      impl(given.unsafeGetTensorImpl()),
      autograd(AutogradOf(*impl)),
      storage(StorageOf(*impl)) {
  if (storage == nullptr) return;
  data = storage->data();
  shape = ShapeOf(*impl);
}

bool WeightWatch::Place::IsLeftBy(const c10::TensorImpl& now) const {
  const c10::StorageImpl* const lies_in = StorageOf(now);
  if (lies_in == nullptr || storage == nullptr) return lies_in != storage;
  return lies_in->data() != data || ShapeOf(now) != shape;
}

void WeightWatch::Place::Fetch() const {
  __builtin_prefetch(tensor);
  cgp::Fetch(impl, sizeof(c10::TensorImpl));
  __builtin_prefetch(storage);
  if (autograd != nullptr) __builtin_prefetch(&autograd->requires_grad_);
}

void WeightWatch::Look() {
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

void WeightWatch::NoteFlags() {
  std::string flags;
  for (Place& place : tensors_) {
    place.requires_grad = RequiresGradients(*place.tensor->unsafeGetTensorImpl());
    flags += place.requires_grad ? 'g' : '-';
  }
  for (const py::dict& attributes : attributes_) {
    flags += PyDict_GetItem(attributes.ptr(), training_.ptr()) == Py_True ? 't' : 'e';
  }
  flags_ = py::bytes(flags);
}

void WeightWatch::Note(const py::dict& home, bool has_tensors) {
  dicts_.Add(home);
  homes_.push_back({home, home.size()});
  for (const auto& [name, value] : home) {
    values_.push_back(py::reinterpret_borrow<py::object>(value));
    if (!has_tensors || !THPVariable_Check(value.ptr())) continue;
    const at::Tensor& tensor = THPVariable_Unpack(value.ptr());
    tensors_.emplace_back(tensor);
    if (tensor.has_storage()) storages_.push_back(tensor.storage());
  }
}

void BindWeights(py::module_& m) {
  py::class_<WeightWatch>(m, "WeightWatch", py::custom_type_setup(&LetCirclesBeFound<WeightWatch>))
      .def(py::init<const std::vector<py::dict>&, const std::vector<py::dict>&,
                    const std::vector<py::dict>&>(),
           py::arg("homes"), py::arg("tensor_homes"), py::arg("attributes"))
      .def("flags", &WeightWatch::Flags);
}

}  // namespace cgp
