#include "python/torch_replays.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy_ops.h>
#include <ATen/ops/clone_ops.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/fill_ops.h>
#include <pybind11/stl.h>

#include "python/torch_parts.h"
#include "torch/runtime.h"

namespace py = pybind11;

namespace cgp {
namespace {

const at::Tensor& TensorOf(py::handle object) {
  if (!THPVariable_Check(object.ptr())) throw py::type_error("a tensor is expected");
  return THPVariable_Unpack(object.ptr());
}

std::vector<at::Tensor> TensorsOf(const py::sequence& objects) {
  std::vector<at::Tensor> tensors;
  for (const py::handle object : objects) tensors.push_back(TensorOf(object));
  return tensors;
}

py::object Wrapped(at::Tensor tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(tensor)));
}

// As detach(), but for the record of a view, which takes longer than the rest.
at::Tensor Alias(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return at::Tensor(impl.shallow_copy_and_detach(impl.version_counter(),
                                                 /*allow_tensor_metadata_change=*/false));
}

}  // namespace

Copies::Copies(const py::list& filled, const py::list& alone, const py::list& together) {
  for (const py::handle each : filled) {
    const auto pair = py::cast<py::tuple>(each);
    filled_.emplace_back(TensorOf(pair[0]), TensorOf(pair[1]));
  }
  for (const py::handle each : alone) {
    const auto pair = py::cast<py::tuple>(each);
    alone_.emplace_back(py::cast<std::size_t>(pair[0]), TensorOf(pair[1]));
  }
  for (const py::handle each : together) {
    const auto parts = py::cast<py::tuple>(each);
    Together& added = together_.emplace_back();
    for (const py::handle place : parts[0]) added.places.push_back(py::cast<std::size_t>(place));
    added.targets = TensorsOf(parts[1]);
    added.constant = TensorsOf(parts[2]);
  }
}

void Copies::Copy(const py::list& tensors) {
  std::vector<at::Tensor> given = TensorsOf(tensors);
  const py::gil_scoped_release no_gil_now;
  const at::NoGradGuard no_grad;
  for (auto& [target, value] : filled_) at::_ops::fill__Tensor::call(target, value);
  for (auto& [place, target] : alone_) at::_ops::copy_::call(target, given[place], false);
  for (const auto& [places, targets, constant] : together_) {
    std::vector<at::Tensor> sources;
    sources.reserve(targets.size());
    for (const std::size_t place : places) sources.push_back(given[place]);
    sources.insert(sources.end(), constant.begin(), constant.end());
    at::_ops::_foreach_copy_::call(targets, sources, false);
  }
}

Counters::Counters(const py::list& tensors) {
  for (const at::Tensor& tensor : TensorsOf(tensors)) {
    versions_.push_back(tensor.unsafeGetTensorImpl()->version_counter());
  }
}

void Counters::Count() {
  for (c10::VariableVersion& version : versions_) version.bump();
}

uint64_t Row::Take(py::str name, const std::shared_ptr<Counters>& leaves) {
  what = std::move(name);
  ++number;
  if (leaves != nullptr) {
    wrote = {number, what};
    if (const std::shared_ptr<Counters> last = left_.lock()) last->Count();
    left_ = leaves;
  }
  return number;
}

bool Row::GoesOnAt(uintptr_t next) const {
  if (stream != next) return false;
  if (!device_.is_cuda()) return true;
  const cudaStream_t current = CurrentStream(device_.index());
  return reinterpret_cast<uintptr_t>(current) == next && !IsCapturing(current);
}

Replays::Replays(std::shared_ptr<Copies> copies, py::object graph, const py::list& leaves,
                 py::object assemble, std::shared_ptr<Counters> counters,
                 std::shared_ptr<Counters> changed, py::str what)
    : copies_(std::move(copies)),
      graph_(std::move(graph)),
      assemble_(std::move(assemble)),
      leaves_(leaves),
      counters_(std::move(counters)),
      changed_(std::move(changed)),
      what_(std::move(what)) {
  for (const py::handle leaf : leaves) {
    plain_.push_back(THPVariable_CheckExact(leaf.ptr()) ? std::optional(TensorOf(leaf))
                                                        : std::nullopt);
  }
}

py::list Replays::Run(Row& row, const py::list& tensors, bool copy, const py::object& replay) {
  try {
    copies_->Copy(tensors);
  } catch (...) {
    row.Take("a call that failed", nullptr);  // it has written to inputs at most
    throw;
  }
  row.Take(what_, counters_);
  changed_->Count();
  (replay.is_none() ? py::object(graph_.attr("replay")) : replay)();
  return Leaves(copy);
}

std::optional<std::pair<py::object, py::list>> Replays::RunAt(Row& row, const py::list& tensors,
                                                              bool copy) {
  if (!stream || !row.GoesOnAt(*stream)) return std::nullopt;
  return std::pair(assemble_, Run(row, tensors, copy, py::none()));
}

int Replays::Visit(visitproc visit, void* arg) const {
  Py_VISIT(graph_.ptr());
  Py_VISIT(assemble_.ptr());
  Py_VISIT(leaves_.ptr());
  return 0;
}

void Replays::Clear() {
  graph_ = py::none();
  assemble_ = py::none();
  leaves_ = py::list();
}

py::list Replays::Leaves(bool copy) const {
  const at::NoGradGuard no_grad;
  py::list leaves(plain_.size());
  for (std::size_t i = 0; i < plain_.size(); ++i) {
    const py::object leaf = leaves_[i];
    if (!THPVariable_Check(leaf.ptr())) {
      leaves[i] = leaf;
    } else if (!plain_[i]) {
      leaves[i] = leaf.attr(copy ? "clone" : "detach")();
    } else {
      leaves[i] =
          Wrapped(copy ? at::_ops::clone::call(*plain_[i], std::nullopt) : Alias(*plain_[i]));
    }
  }
  return leaves;
}

void BindReplays(py::module_& m) {
  py::class_<Copies, std::shared_ptr<Copies>>(m, "Copies")
      .def(py::init<const py::list&, const py::list&, const py::list&>(), py::arg("filled"),
           py::arg("alone"), py::arg("together"))
      .def("__call__", &Copies::Copy, py::arg("tensors"));
  py::class_<Counters, std::shared_ptr<Counters>>(m, "Counters")
      .def(py::init<const py::list&>(), py::arg("tensors"));
  py::class_<Row>(m, "Row")
      .def(py::init<const std::string&>(), py::arg("device"))
      .def("take", &Row::Take, py::arg("what"), py::arg("leaves") = nullptr)
      .def("left", &Row::Left, py::arg("counters"))
      .def_readonly("number", &Row::number)
      .def_readonly("what", &Row::what)
      .def_readonly("wrote", &Row::wrote)
      .def_readwrite("stream", &Row::stream);
  py::class_<Replays>(m, "Replays", py::custom_type_setup(&LetCirclesBeFound<Replays>))
      .def(py::init<std::shared_ptr<Copies>, py::object, const py::list&, py::object,
                    std::shared_ptr<Counters>, std::shared_ptr<Counters>, py::str>(),
           py::arg("copies"), py::arg("graph"), py::arg("leaves"), py::arg("assemble"),
           py::arg("counters"), py::arg("changed").none(false), py::arg("what"))
      .def("run", &Replays::Run, py::arg("row"), py::arg("tensors"), py::arg("copy"),
           py::arg("replay") = py::none())
      .def_readwrite("stream", &Replays::stream);
}

}  // namespace cgp
