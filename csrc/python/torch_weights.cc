#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>
#include <string>
#include <utility>

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
// replay asks first, so the answers are bytes: they are compared as part of one key.
std::pair<py::bytes, py::bytes> ReadWeights(const py::list& tensors, const py::list& attributes) {
  static PyObject* const training = PyUnicode_InternFromString("training");
  std::string addresses;
  std::string flags;
  for (const py::handle dict : tensors) {
    PyObject* value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(dict.ptr(), &at, nullptr, &value) != 0;) {
      uintptr_t address = 0;
      if (THPVariable_Check(value)) {
        const at::Tensor& tensor = THPVariable_Unpack(value);
        address = AddressOf(tensor);
        flags += static_cast<char>(tensor.scalar_type());
        flags += tensor.requires_grad() ? 'g' : '-';
      }
      addresses.append(reinterpret_cast<const char*>(&address), sizeof(address));
    }
  }
  for (const py::handle dict : attributes) {
    flags += PyDict_GetItem(dict.ptr(), training) == Py_True ? 't' : 'e';
  }
  return {addresses, flags};
}

}  // namespace

void BindWeights(py::module_& m) {
  m.def("read_weights", &ReadWeights, py::arg("tensors"), py::arg("attributes"));
}

}  // namespace cgp
