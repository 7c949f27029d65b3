#include "python/torch_weights.h"

#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstddef>
#include <vector>

namespace py = pybind11;

namespace cgp {
namespace {

// The dictionaries in which modules register their parts, buffers and parameters. In C++ because a
// model has hundreds of these, and a replay should cost microseconds.
class WeightWatch {
 public:
  // pre: the values are None, and tensors in `tensor_homes`.
  WeightWatch(const std::vector<py::dict>& homes, const std::vector<py::dict>& tensor_homes) {
    for (const py::dict& home : homes) Note(home, /*has_tensors=*/false);
    for (const py::dict& home : tensor_homes) Note(home, /*has_tensors=*/true);
  }

  // Whether a value was added or removed, is another object, or is a tensor that lies elsewhere.
  bool Moved() const {
    std::size_t next = 0;
    for (const Home& home : homes_) {
      if (home.dict.size() != home.size) return true;
      for (const auto& [name, value] : home.dict) {
        const Value& known = values_[next++];
        if (value.ptr() != known.object.ptr()) return true;
        if (home.has_tensors && AddressOf(value.ptr()) != known.address) return true;
      }
    }
    return false;
  }

 private:
  struct Home {
    py::dict dict;
    std::size_t size;
    bool has_tensors;
  };
  struct Value {
    py::object object;  // kept, so that no other one can have its place
    const void* address;
  };

  void Note(const py::dict& home, bool has_tensors) {
    homes_.push_back({home, home.size(), has_tensors});
    for (const auto& [name, value] : home) {
      values_.push_back({py::reinterpret_borrow<py::object>(value),
                         has_tensors ? AddressOf(value.ptr()) : nullptr});
    }
  }

  static const void* AddressOf(PyObject* tensor_or_none) {
    if (tensor_or_none == Py_None) return nullptr;
    const c10::TensorImpl& tensor = *THPVariable_Unpack(tensor_or_none).unsafeGetTensorImpl();
    return tensor.has_storage() ? tensor.unsafe_storage().data() : nullptr;
  }

  std::vector<Home> homes_;
  std::vector<Value> values_;  // of the homes, one after the other
};

}  // namespace

void BindWeights(py::module_& m) {
  py::class_<WeightWatch>(m, "WeightWatch")
      .def(py::init<const std::vector<py::dict>&, const std::vector<py::dict>&>(), py::arg("homes"),
           py::arg("tensor_homes"))
      .def("moved", &WeightWatch::Moved);
}

}  // namespace cgp
