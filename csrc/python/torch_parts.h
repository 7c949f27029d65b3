// What cudagraph_pool._torch consists of beside the allocator.
#pragma once

#include <pybind11/pybind11.h>

namespace cgp {

// CallReader, asked of each call, and shapes_of: what of a call decides how it is run.
void BindCalls(pybind11::module_& m);

// ExecCache, SharedGraph: a file of their own, since the header of torch.cuda.CUDAGraph is long to compile.
void BindExecs(pybind11::module_& m);

// WeightWatch: whether tensors are where they were, asked before each replay.
void BindWeights(pybind11::module_& m);

}  // namespace cgp
