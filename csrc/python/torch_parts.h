// What cudagraph_pool._torch consists of beside the allocator.
#pragma once

#include <pybind11/pybind11.h>

namespace cgp {

// So that Python's garbage collector finds circles through objects of a class, which pybind11
// leaves to whoever binds it. Its Visit shows what an object holds, and its Clear lets go of that.
template <typename T>
void LetCirclesBeFound(PyHeapTypeObject* heap_type) {
  PyTypeObject* const type = &heap_type->ht_type;
  type->tp_flags |= Py_TPFLAGS_HAVE_GC;
  type->tp_traverse = [](PyObject* self, visitproc visit, void* arg) -> int {
    Py_VISIT(Py_TYPE(self));
    if (!pybind11::detail::is_holder_constructed(self)) return 0;
    return pybind11::cast<const T&>(pybind11::handle(self)).Visit(visit, arg);
  };
  type->tp_clear = [](PyObject* self) -> int {
    pybind11::cast<T&>(pybind11::handle(self)).Clear();
    return 0;
  };
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

// blas_workspaces, hold_workspaces, make_stream: what cuBLAS computes in on which stream, what keeps
// that for graphs, and streams that torch has not given to anybody.
void BindWorkspaces(pybind11::module_& m);

}  // namespace cgp
