// What the tests of captures of several streams share: a pool whose streams capture graphs on the
// host, and which is checked after each step.
#pragma once

#include <gtest/gtest.h>

#include <initializer_list>

#include "core/pool.h"
#include "core/pool_test_pool.h"
#include "driver/host_driver.h"

namespace cgp {

inline constexpr StreamId kD{4};

class PoolProofsTest : public PoolTest {
 protected:
  // Begins a scope of the pool and, as PyTorch does, then a capture.
  CaptureId Begin(std::initializer_list<StreamId> streams) {
    pool_.BeginScope(ScopeKind::kCapture);
    return BeginCapture(streams);
  }
  // On the first stream, which the others join before anything is captured.
  CaptureId BeginCapture(std::initializer_list<StreamId> streams) {
    const CaptureId capture = graphs_.Begin(*streams.begin());
    for (const StreamId stream : streams) Join(stream, *streams.begin());
    return capture;
  }
  // Ends the capture and then the scope.
  void End(CaptureId capture) {
    graphs_.End(capture);
    EndScope();
  }
  void EndScope() {
    pool_.EndScope();
    pool_.Check();
  }

  Block Allocate(uint64_t bytes, StreamId stream) {
    const Block block = PoolTest::Allocate(bytes, stream);
    pool_.Check();
    return block;
  }
  void Free(const Block& block) {
    pool_.Free(block.address);
    pool_.Check();
  }
  void Use(const Block& block, StreamId stream) {
    pool_.RecordUse(block.address, stream);
    pool_.Check();
  }
  // Whether a block gets memory that the pool has already. It lives on.
  bool Reuses(uint64_t bytes, StreamId stream) {
    const uint64_t pages = pool_.Stats().pages;
    Allocate(bytes, stream);
    return pool_.Stats().pages == pages;
  }

  GraphNode Launch(StreamId stream) { return graphs_.Launch(stream); }
  // The stream waits for all that the other one has captured.
  void Join(StreamId stream, StreamId other) { Wait(stream, Record(other)); }
  Frontier Record(StreamId stream) const { return graphs_.Record(stream); }
  void Wait(StreamId stream, const Frontier& event) { graphs_.Wait(stream, event); }

  HostGraphs& graphs_ = host_.graphs();
};

}  // namespace cgp
