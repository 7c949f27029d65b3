// What cudagraph_pool._torch consists of beside the allocator.
#pragma once

#include <pybind11/pybind11.h>

namespace cgp {

// ExecCache, SharedGraph: a file of their own, since torch.cuda.CUDAGraph's header compiles slowly.
void BindExecs(pybind11::module_& m);

// read_weights: where the parameters and buffers of modules are.
void BindWeights(pybind11::module_& m);

// blas_workspaces, hold_workspaces, make_stream: cuBLAS's workspaces by stream, what holds them for
// graphs, and streams that torch has given to nobody.
void BindWorkspaces(pybind11::module_& m);

}  // namespace cgp
