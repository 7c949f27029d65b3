// What the tests of checkpoints share: a set on memory that is really mapped, the device's progress
// in the test's hands, and driver calls that fail on demand.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "core/pool_set.h"
#include "core/pool_values.h"
#include "driver/faulty_driver.h"
#include "testing/driver_watch.h"
#include "testing/host_driver.h"

namespace cgp {

class CheckpointTest : public ::testing::Test {
 protected:
  static constexpr StreamId kA{1};
  static constexpr StreamId kB{2};
  static constexpr StreamId kC{3};
  static constexpr PoolId kId{0, 1};
  static constexpr uint64_t kPage = 8192;  // 16 granules
  static constexpr uint64_t kGranule = kGranuleBytes;

  // A block and the physical bytes behind it, comparable.
  using Bytes = std::vector<std::tuple<uint32_t, uint64_t, uint64_t>>;
  using Live = std::map<Address, std::pair<uint64_t, Bytes>>;

  void TearDown() override {
    EXPECT_NO_THROW(set_.Check());
    EXPECT_THAT(watch_.violations(), ::testing::IsEmpty());
  }

  Block Allocate(uint64_t bytes, StreamId stream = kA) {
    const Block block = set_.Allocate(kId, bytes, stream);
    watch_.MarkUsed();
    return block;
  }

  // One block, allocated in a scope of its own.
  Block AllocateIn(ScopeKind kind, uint64_t bytes, StreamId stream = kA) {
    set_.BeginScope(kId, kind);
    const Block block = Allocate(bytes, stream);
    set_.EndScope(kId);
    return block;
  }

  // All live blocks by their addresses. Expects that no two of them share a byte.
  Live Living() const {
    Live live;
    std::set<std::pair<uint32_t, uint64_t>> taken;
    for (const auto& entry : set_.Snapshot(kId).blocks) {
      Bytes bytes;
      for (const PhysicalPiece& piece : entry.pieces) {
        bytes.emplace_back(Index(piece.page), piece.offset_bytes, piece.length_bytes);
        for (uint64_t b = 0; b < piece.length_bytes; b += kGranule) {
          EXPECT_TRUE(taken.emplace(Index(piece.page), piece.offset_bytes + b).second);
        }
      }
      live[entry.block.address] = {entry.block.bytes, std::move(bytes)};
    }
    return live;
  }

  static bool Overlap(const std::vector<PhysicalPiece>& some,
                      const std::vector<PhysicalPiece>& others) {
    for (const PhysicalPiece& a : some) {
      for (const PhysicalPiece& b : others) {
        if (a.page == b.page && a.offset_bytes < b.offset_bytes + b.length_bytes &&
            b.offset_bytes < a.offset_bytes + a.length_bytes) {
          return true;
        }
      }
    }
    return false;
  }

  // Whether a block of `bytes` on this stream would get some of the bytes of `pieces` in a scope of
  // this kind.
  bool GetsBytesOf(const std::vector<PhysicalPiece>& pieces, uint64_t bytes, StreamId stream,
                   ScopeKind kind) {
    set_.BeginScope(kId, kind);
    const Block block = Allocate(bytes, stream);
    const bool gets = Overlap(set_.Pieces(block.address), pieces);
    set_.Free(block.address);
    set_.EndScope(kId);
    return gets;
  }

  static void Fill(const Block& block, uint64_t word) {
    for (uint64_t i = 0; i < block.bytes / 8; ++i) Words(block)[i] = word + i;
  }
  static bool Holds(const Block& block, uint64_t word) {
    for (uint64_t i = 0; i < block.bytes / 8; ++i) {
      if (Words(block)[i] != word + i) return false;
    }
    return true;
  }

  HostDriver host_{{.granularity = 4096}};
  DriverWatch watch_{host_};
  FaultyDriver faulty_{watch_};
  PoolSet set_{faulty_, {.page_bytes = kPage}};

 private:
  static uint64_t* Words(const Block& block) {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): the host driver's addresses are this process's.
    return reinterpret_cast<uint64_t*>(block.address);
  }
};

}  // namespace cgp
