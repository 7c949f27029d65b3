// Whether the tensors of modules are where they were: asked before each replay.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace cgp {

// Tells whether one of some dictionaries may have changed since it was asked last.
class DictWatch {
 public:
  void Add(const pybind11::dict& dict);
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

// The modules that a graph was captured with, by the dictionaries in which they register their
// parts, buffers and parameters. In C++ because a model has hundreds of these, and a replay should
// cost microseconds.
class WeightWatch {
 public:
  // The tensors in `tensor_homes` are looked at too; `attributes` are those of modules.
  WeightWatch(const std::vector<pybind11::dict>& homes,
              const std::vector<pybind11::dict>& tensor_homes,
              const std::vector<pybind11::dict>& attributes);

  // What of the modules may change from call to call: which of them are in training, and which
  // tensors require gradients. nullopt if one has moved: a value was added or removed, is another
  // object, or is a tensor of other memory.
  std::optional<pybind11::bytes> Flags();

  // For Python's garbage collector: a module may have a runner that watches what the module is of.
  int Visit(visitproc visit, void* arg) const;
  void Clear();

 private:
  struct Home {
    pybind11::dict dict;
    std::size_t size;
  };
  // Where a tensor was. Small, since all of them are looked at in each call.
  struct Place {
    const at::Tensor* tensor;                       // in its object
    const c10::TensorImpl* impl;                    // to be fetched, as the next
    const torch::autograd::AutogradMeta* autograd;  // nullptr of what never required gradients
    const c10::StorageImpl* storage;                // nullptr of what has no memory of its own
    const void* data = nullptr;
    uint64_t shape = 0;
    bool requires_grad = false;

    explicit Place(const at::Tensor& given);
    bool IsLeftBy(const c10::TensorImpl& now) const;
    void Fetch() const;
  };

  // After a change of dictionaries: whether they have the same values.
  void Look();
  void NoteFlags();
  void Note(const pybind11::dict& home, bool has_tensors);

  DictWatch dicts_;
  std::vector<Place> tensors_;
  std::vector<Home> homes_;
  // Kept, so that nothing else can have their places.
  std::vector<pybind11::object> values_;  // of the homes, one after the other
  std::vector<c10::Storage> storages_;
  std::vector<pybind11::dict> attributes_;
  std::optional<pybind11::bytes> flags_;  // as they were last; nullopt if there are other values
  pybind11::str training_{"training"};
};

}  // namespace cgp
