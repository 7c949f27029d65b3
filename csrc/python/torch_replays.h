// What a call does besides the launch of its graph. In C++, since a program calls hundreds of
// shapes in turn: each object of Python's is a wait for memory.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/TensorImpl.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace cgp {

// Copies of the tensors of calls of one shape to where a graph reads them.
class Copies {
 public:
  // `filled`: tensors, each with what it is filled with, of no dimension. `alone`: the place of a
  // tensor among those of a call, and its target. `together`: the places of several of one type,
  // their targets, and in the end sources of the targets that are left.
  Copies(const pybind11::list& filled, const pybind11::list& alone, const pybind11::list& together);

  // pre: `tensors` are as many as there are places.
  void Copy(const pybind11::list& tensors);

 private:
  struct Together {
    std::vector<std::size_t> places;
    std::vector<at::Tensor> targets;
    std::vector<at::Tensor> constant;
  };
  std::vector<std::pair<at::Tensor, at::Tensor>> filled_;
  std::vector<std::pair<std::size_t, at::Tensor>> alone_;
  std::vector<Together> together_;
};

// Of what a graph leaves how often autograd has seen it change; not the tensors, which may lead to
// whoever holds this.
class Counters {
 public:
  explicit Counters(const pybind11::list& tensors);
  void Count();

 private:
  std::vector<c10::VariableVersion> versions_;
};

// The row that the replays of one pool's graphs form: each overwrites what those before it left.
class Row {
 public:
  explicit Row(const std::string& device) : device_(device) {}

  // The next one comes; returns its number. `leaves` counts changes of what it leaves: who has
  // saved that for a backward pass gets autograd's error once the one behind it has come. None of
  // what writes no more than what graphs read.
  uint64_t Take(pybind11::str what, const std::shared_ptr<Counters>& leaves);
  // Whether the last one that leaves anything leaves that.
  bool Left(const std::shared_ptr<Counters>& counters) const { return left_.lock() == counters; }
  // Whether the next one comes on `stream` as the last one did, and may be replayed there.
  bool GoesOnAt(uintptr_t stream) const;

  uint64_t number = 0;                       // of the last one
  pybind11::str what;                        // it was, for errors
  std::pair<uint64_t, pybind11::str> wrote;  // the last one that leaves anything
  std::optional<uintptr_t> stream;           // of the last one

 private:
  c10::Device device_;
  std::weak_ptr<Counters> left_;  // lives as long as somebody may have what it counts for
};

// How calls of one shape are replayed.
class Replays {
 public:
  // `leaves`: what such a call returns, tensors where the graph leaves them and constants;
  // `assemble` makes of them what the function returned. `counters` counts changes of the leaves,
  // `changed` of what else each replay changes.
  Replays(std::shared_ptr<Copies> copies, pybind11::object graph, const pybind11::list& leaves,
          pybind11::object assemble, std::shared_ptr<Counters> counters,
          std::shared_ptr<Counters> changed, pybind11::str what);

  // Copies, replays the graph, by `replay` unless None, and returns the leaves: of each tensor a
  // new one, of its memory or a copy. pre: it is ordered behind the last one of the row, and nobody
  // else replays meanwhile.
  pybind11::list Run(Row& row, const pybind11::list& tensors, bool copy,
                     const pybind11::object& replay);
  // The same by the graph itself; and what assembles the leaves, for when others may replay again.
  // nullopt where the pool's order, or what memory knows of streams, has to be seen to before.
  std::optional<std::pair<pybind11::object, pybind11::list>> RunAt(Row& row,
                                                                   const pybind11::list& tensors,
                                                                   bool copy);

  // For Python's garbage collector: what a function returns may hold the runner, as the factory of
  // a defaultdict does that is a method of its module.
  int Visit(visitproc visit, void* arg) const;
  void Clear();

  // The stream for which that was seen to.
  std::optional<uintptr_t> stream;

 private:
  pybind11::list Leaves(bool copy) const;

  std::shared_ptr<Copies> copies_;
  pybind11::object graph_;
  pybind11::object assemble_;
  pybind11::list leaves_;
  std::vector<std::optional<at::Tensor>> plain_;  // of the leaves those that are of no other class
  std::shared_ptr<Counters> counters_;
  std::shared_ptr<Counters> changed_;
  pybind11::str what_;
};

}  // namespace cgp
