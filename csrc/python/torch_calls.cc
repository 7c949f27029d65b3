#include <c10/core/Layout.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>
#include <sstream>
#include <string>

#include "python/torch_parts.h"

namespace py = pybind11;

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

// The tensors among the leaves of a call, and bytes: equal for calls whose tensors are alike in all but
// what they hold. In C++ since a call should cost microseconds, and their attributes are most of one.
py::tuple ShapesOf(const py::sequence& leaves) {
  py::list tensors;
  std::string key;
  for (const py::handle leaf : leaves) {
    if (!THPVariable_Check(leaf.ptr())) continue;
    const at::Tensor& tensor = THPVariable_Unpack(leaf.ptr());
    if (tensor.layout() != c10::kStrided || tensor.is_nested()) {
      std::ostringstream message;
      message << "an argument is a tensor with layout " << tensor.layout()
              << "; a graph's must be strided";
      throw py::type_error(message.str());
    }
    Append(key, tensor);
    tensors.append(leaf);
  }
  return py::make_tuple(std::move(tensors), py::bytes(key));
}

}  // namespace

void BindCalls(py::module_& m) { m.def("shapes_of", &ShapesOf, py::arg("leaves")); }

}  // namespace cgp
