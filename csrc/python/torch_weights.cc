#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "python/torch_parts.h"

namespace py = pybind11;

namespace cgp {
namespace {

// 0 for a tensor without storage of its own: a sparse one, or one that wraps other tensors.
uintptr_t AddressOf(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  if (!impl.has_storage() || impl.unsafe_storage().data() == nullptr) return 0;
  if (impl.key_set().has(c10::DispatchKey::NestedTensor)) return 0;  // it has several offsets
  const auto begin = reinterpret_cast<uintptr_t>(impl.unsafe_storage().data());
  return begin + static_cast<uintptr_t>(impl.storage_offset()) * impl.itemsize();
}

// Reads the addresses of parameters and buffers, and the flags of them and their modules. Each
// replay asks first, and they are part of its key. So what is still as `known` is that object, whose
// hash is known as well.
std::pair<py::bytes, py::bytes> ReadWeights(const py::list& tensors, const py::list& attributes,
                                            std::pair<py::bytes, py::bytes> known) {
  static PyObject* const training = PyUnicode_InternFromString("training");
  auto* const tensor_type = reinterpret_cast<PyTypeObject*>(THPVariableClass);
  // Apart from what they point to, which may have to come from memory: then many come at once.
  std::vector<PyObject*> weights;
  weights.reserve(std::string_view(known.first).size() / sizeof(uintptr_t));
  for (const py::handle dict : tensors) {
    if (PyDict_GET_SIZE(dict.ptr()) == 0) continue;  // as most are
    PyObject* weight = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(dict.ptr(), &at, nullptr, &weight) != 0;) {
      weights.push_back(weight);
    }
  }
  std::vector<uintptr_t> addresses(weights.size());
  std::string flags(2 * weights.size(), '-');
  for (std::size_t n = 0; n < weights.size(); ++n) {
    // By type: isinstance() of what is no tensor, as each missing bias, would ask torch's metaclass.
    if (!PyObject_TypeCheck(weights[n], tensor_type)) continue;
    const at::Tensor& tensor = THPVariable_Unpack(weights[n]);
    addresses[n] = AddressOf(tensor);
    flags[2 * n] = static_cast<char>(tensor.scalar_type());
    if (tensor.requires_grad()) flags[2 * n + 1] = 'g';
  }
  for (const py::handle dict : attributes) {
    PyObject* name = nullptr;
    PyObject* value = nullptr;
    Py_ssize_t at = 0;
    // It is what a module sets first.
    if (PyDict_Next(dict.ptr(), &at, &name, &value) == 0 || name != training) {
      value = PyDict_GetItemWithError(dict.ptr(), training);
    }
    flags += value == Py_True ? 't' : 'e';
  }
  const std::string_view bytes(reinterpret_cast<const char*>(addresses.data()),
                               addresses.size() * sizeof(uintptr_t));
  if (std::string_view(known.first) != bytes) known.first = py::bytes(bytes);
  if (std::string_view(known.second) != flags) known.second = py::bytes(flags);
  return known;
}

}  // namespace

void BindWeights(py::module_& m) {
  m.def("read_weights", &ReadWeights, py::arg("tensors"), py::arg("attributes"), py::arg("known"));
}

}  // namespace cgp
