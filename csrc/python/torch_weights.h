#pragma once

#include <pybind11/pybind11.h>

namespace cgp {

// WeightWatch: whether tensors are where they were, asked before each replay.
void BindWeights(pybind11::module_& m);

}  // namespace cgp
