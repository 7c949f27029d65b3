// The part of cudagraph_pool._torch that needs to know torch.cuda.CUDAGraph, whose header is long to
// compile.
#pragma once

#include <pybind11/pybind11.h>

namespace cgp {

void BindExecs(pybind11::module_& m);

}  // namespace cgp
