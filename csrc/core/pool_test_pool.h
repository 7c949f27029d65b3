// What the tests of pool.h share.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "core/pool.h"
#include "testing/driver_watch.h"
#include "testing/host_driver.h"
#include "testing/test_names.h"

namespace cgp {

// A pool on numbers instead of memory; what is mapped and what the device has done is the watch's
// to say.
class PoolTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kPage = 8192;  // 16 granules

  void TearDown() override {
    EXPECT_NO_THROW(pool_.Check());
    watch_.Quiesce();
    EXPECT_THAT(watch_.violations(), ::testing::IsEmpty());
  }

  // As whoever allocates knows it without a driver call of the pool's.
  CaptureId CaptureOf(StreamId stream) {
    Frontier frontier;
    host_.graphs().Capture(stream, &frontier);
    return frontier.capture;
  }

  Block Allocate(uint64_t bytes, StreamId stream = kA) {
    const Block block = pool_.Allocate(bytes, stream, CaptureOf(stream));
    watch_.MarkUsed();
    return block;
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

  // Whether a block of `bytes` gets bytes of the page and place that `freed` had.
  bool GetsBytesOf(const std::vector<PhysicalPiece>& freed, uint64_t bytes, StreamId stream) {
    return Overlap(AllocateAndFree(bytes, stream), freed);
  }

  std::vector<PhysicalPiece> AllocateAndFree(uint64_t bytes, StreamId stream) {
    const Block block = Allocate(bytes, stream);
    std::vector<PhysicalPiece> pieces = pool_.Pieces(block.address);
    pool_.Free(block.address);
    return pieces;
  }

  HostDriver host_{{.granularity = 4096, .map_memory = false}};
  DriverWatch watch_{host_};
  Pool pool_{watch_, {.page_bytes = kPage}};
};

}  // namespace cgp
