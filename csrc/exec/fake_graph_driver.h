// Executables for tests: only a book of what each of them holds.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "exec/graph_driver.h"

namespace cgp {

// What was done through a FakeGraphDriver; outlives it.
class GraphBook {
 public:
  enum class Call : uint8_t { kKindOf, kInstantiate, kUpdate, kUpload };
  struct Fault {
    uint64_t call_number = 1;  // from 1, of all calls or of those of `only`
    bool for_good = false;
    std::optional<Call> only = std::nullopt;
    DriverStatus status = DriverStatus::kFailed;
  };

  void SetKind(Graph graph, std::string key, std::string alone = {}) {
    const std::lock_guard lock(mutex_);
    kinds_[graph] = {.key = std::move(key), .alone = std::move(alone), .exec_bytes = 1};
  }
  // Updates to the graph are refused from now on.
  void Refuse(Graph graph) {
    const std::lock_guard lock(mutex_);
    refused_.insert(graph);
  }
  void Arm(const Fault& fault) {
    const std::lock_guard lock(mutex_);
    fault_ = fault;
    counted_ = 0;
  }
  void Disarm() {
    const std::lock_guard lock(mutex_);
    fault_.reset();
  }

  // nullopt: that is not known, or there is no such executable.
  std::optional<Graph> HeldBy(GraphExec exec) const {
    const std::lock_guard lock(mutex_);
    const auto found = holds_.find(exec);
    return found == holds_.end() ? std::nullopt : found->second;
  }
  std::size_t living() const { return Read(holds_).size(); }
  // Executables and graphs that do not exist, or not any more, and were named all the same.
  int mistakes() const { return Read(mistakes_); }
  uint64_t failures() const { return Read(failures_); }
  uint64_t instantiations() const { return Read(instantiations_); }
  uint64_t updates() const { return Read(updates_); }
  std::vector<GraphExec> changed() const { return Read(changed_); }
  void ForgetChanges() {
    const std::lock_guard lock(mutex_);
    changed_.clear();
  }
  std::vector<std::pair<GraphExec, StreamId>> uploads() const { return Read(uploads_); }

 private:
  friend class FakeGraphDriver;

  template <typename Value>
  Value Read(const Value& member) const {
    const std::lock_guard lock(mutex_);
    return member;
  }

  void Count(Call call) {
    if (!fault_ || (fault_->only && *fault_->only != call)) return;
    ++counted_;
    if (fault_->for_good ? counted_ < fault_->call_number : counted_ != fault_->call_number) return;
    ++failures_;
    throw DriverError(fault_->status, "fake", 1, "FAKE", 0, 0);
  }

  mutable std::mutex mutex_;
  std::map<Graph, GraphKind> kinds_;
  std::set<Graph> refused_;
  std::map<GraphExec, std::optional<Graph>> holds_;
  std::vector<GraphExec> changed_;  // updated, or asked to be, since ForgetChanges()
  std::vector<std::pair<GraphExec, StreamId>> uploads_;
  std::optional<Fault> fault_;
  uint64_t counted_ = 0;
  uint64_t failures_ = 0;
  uint64_t instantiations_ = 0;
  uint64_t updates_ = 0;
  uint64_t last_exec_ = 0x1000;
  int mistakes_ = 0;
};

class FakeGraphDriver final : public GraphDriver {
 public:
  explicit FakeGraphDriver(GraphBook& book) : book_(book) {}

  GraphKind KindOf(Graph graph) override {
    const std::lock_guard lock(book_.mutex_);
    book_.Count(GraphBook::Call::kKindOf);
    return book_.kinds_.at(graph);
  }

  GraphExec Instantiate(Graph graph) override {
    const std::lock_guard lock(book_.mutex_);
    book_.Count(GraphBook::Call::kInstantiate);
    if (!book_.kinds_.contains(graph)) ++book_.mistakes_;
    const GraphExec exec{++book_.last_exec_};
    book_.holds_[exec] = graph;
    ++book_.instantiations_;
    return exec;
  }

  bool Update(GraphExec exec, Graph graph) override {
    const std::lock_guard lock(book_.mutex_);
    const auto found = book_.holds_.find(exec);
    if (found == book_.holds_.end() || !book_.kinds_.contains(graph)) {
      ++book_.mistakes_;
      return false;
    }
    book_.changed_.push_back(exec);
    // The contract says that one that fails has changed nothing, but nobody should count on it.
    const std::optional<Graph> before = std::exchange(found->second, std::nullopt);
    book_.Count(GraphBook::Call::kUpdate);
    if (before && book_.kinds_.at(*before).key != book_.kinds_.at(graph).key) ++book_.mistakes_;
    if (!book_.kinds_.at(graph).alone.empty()) ++book_.mistakes_;
    if (book_.refused_.contains(graph)) {
      found->second = before;  // as the contract says
      return false;
    }
    found->second = graph;
    ++book_.updates_;
    return true;
  }

  void Upload(GraphExec exec, StreamId stream) override {
    const std::lock_guard lock(book_.mutex_);
    book_.Count(GraphBook::Call::kUpload);
    if (!book_.holds_.contains(exec)) ++book_.mistakes_;
    book_.uploads_.emplace_back(exec, stream);
  }

  void Destroy(GraphExec exec) noexcept override {
    const std::lock_guard lock(book_.mutex_);
    if (book_.holds_.erase(exec) == 0) ++book_.mistakes_;
  }

 private:
  GraphBook& book_;
};

}  // namespace cgp
