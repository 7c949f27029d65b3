#pragma once

#include <pybind11/pybind11.h>

namespace cgp {

// shapes_of: what of a call's tensors decides how it is run, asked of each call.
void BindCalls(pybind11::module_& m);

}  // namespace cgp
