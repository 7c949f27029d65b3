// What cudagraph_pool._torch consists of beside the allocator.
#pragma once

#include <pybind11/pybind11.h>

namespace cgp {

// ExecCache, SharedGraph: a file of their own, since the header of torch.cuda.CUDAGraph is long to
// compile.
void BindExecs(pybind11::module_& m);

// read_weights: where the parameters and buffers of modules are.
void BindWeights(pybind11::module_& m);

// blas_workspaces, hold_workspaces, make_stream: what cuBLAS computes in on which stream, what keeps
// that for graphs, and streams that torch has not given to anybody.
void BindWorkspaces(pybind11::module_& m);

}  // namespace cgp
