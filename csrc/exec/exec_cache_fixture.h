// What the tests of ExecCache start from: it, over a book of executables and the events of the
// host.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "driver/faulty_driver.h"
#include "exec/exec_cache.h"
#include "exec/fake_graph_driver.h"
#include "testing/host_driver.h"
#include "testing/test_names.h"

namespace cgp {

class ExecCacheTest : public ::testing::Test {
 protected:
  ~ExecCacheTest() override {
    cache_.reset();
    EXPECT_EQ(book_.living(), 0u) << "an executable was left behind";
    EXPECT_EQ(book_.mistakes(), 0) << "something that does not exist was named, or destroyed twice";
    EXPECT_EQ(host_.usage().events, 0u) << "an event was left behind";
    EXPECT_EQ(host_.unknown_events_destroyed(), 0u);
  }

  void MakeCache(std::optional<size_t> max_execs,
                 std::chrono::milliseconds longest_wait = std::chrono::milliseconds(0),
                 uint64_t budget_bytes = 0) {
    cache_ = std::make_unique<ExecCache>(std::make_unique<FakeGraphDriver>(book_), events_,
                                         max_execs, budget_bytes, longest_wait);
  }

  GraphNumber Add(Graph graph, const std::string& key = "like", const std::string& alone = {}) {
    book_.SetKind(graph, key, alone);
    const GraphNumber number = cache_->Add(graph);
    graphs_[number] = graph;
    return number;
  }
  void Remove(GraphNumber number) {
    cache_->Remove(number);
    graphs_.erase(number);
  }

  // As a launch that is queued on the stream.
  GraphExec Launch(GraphNumber number, StreamId stream, bool lasts = true) {
    const GraphExec exec = cache_->Lease(number, stream);
    EXPECT_EQ(book_.HeldBy(exec), graphs_.at(number)) << "another graph would run";
    Return(number, stream, lasts);
    return exec;
  }
  void Return(GraphNumber number, StreamId stream, bool lasts = true) {
    cache_->Return(number, {.stream = stream, .stream_lasts = lasts});
  }
  // Whether somebody comes to ask if a launch has ended.
  bool SomebodyAsks() const {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (host_.calls()[DriverCall::kEventDone] == 0) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::yield();
    }
    return true;
  }
  // All the ways in which the outside sees how many there are.
  size_t Execs() const {
    EXPECT_EQ(cache_->stats().execs, book_.living());
    EXPECT_EQ(cache_->stats().instantiations, book_.instantiations());
    EXPECT_EQ(cache_->stats().updates, book_.updates());
    return cache_->stats().execs;
  }

  HostDriver host_{{.granularity = 4096, .map_memory = false}};
  FaultyDriver events_{host_};
  GraphBook book_;
  std::map<GraphNumber, Graph> graphs_;
  std::unique_ptr<ExecCache> cache_;
};

}  // namespace cgp
