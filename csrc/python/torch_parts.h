// What cudagraph_pool._torch consists of beside the allocator.
#pragma once

#include <pybind11/pybind11.h>

namespace cgp {

// What a method returns of what it leaves to another one.
inline pybind11::object NotImplemented() {
  return pybind11::reinterpret_borrow<pybind11::object>(Py_NotImplemented);
}

// CallReader, asked of each call, and shapes_of: what of a call decides how it is run.
void BindCalls(pybind11::module_& m);

// ExecCache, SharedGraph: a file of their own, since the header of torch.cuda.CUDAGraph is long to
// compile.
void BindExecs(pybind11::module_& m);

// Copies, Counters, Row, Replays: what a call does besides the launch of its graph.
void BindReplays(pybind11::module_& m);

// WeightWatch: whether tensors are where they were, asked before each replay.
void BindWeights(pybind11::module_& m);

}  // namespace cgp
