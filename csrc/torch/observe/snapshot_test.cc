// Segments and blocks as shown to torch, against what the pool says of itself.
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>
#include <vector>

#include "torch/device_pools.h"
#include "torch/observe/history.h"
#include "torch/testing/fake_cuda.h"

namespace cgp {
namespace {

using c10::CachingDeviceAllocator::SegmentInfo;
using fake_cuda::kPage;

constexpr PoolId kId{0, 1};
constexpr StreamId kStream{1};

class SnapshotTest : public ::testing::Test {
 protected:
  void SetUp() override { set().BeginScope(kId, ScopeKind::kCapture); }

  PoolSet& set() { return pools_.set; }
  Address Allocate(uint64_t bytes, StreamId stream = kStream) {
    return set().Allocate(kId, bytes, stream).address;
  }
  std::vector<SegmentInfo> Segments(std::optional<PoolId> only = std::nullopt) {
    std::vector<SegmentInfo> segments;
    pools_.AppendSegments(only, history_, segments);
    return segments;
  }
  // Which physical bytes, as (page, granule), an address stands for.
  static std::map<Address, std::pair<PageId, uint64_t>> Granules(const PoolSnapshot& pool) {
    std::map<Address, std::pair<PageId, uint64_t>> granules;
    for (const PoolSnapshot::Range& range : pool.ranges) {
      for (size_t i = 0; i < range.pages.size(); ++i) {
        for (uint64_t at = 0; at < pool.stats.page_bytes; at += kGranuleBytes) {
          granules[range.address + i * pool.stats.page_bytes + at] = {range.pages[i], at};
        }
      }
    }
    return granules;
  }

  // What the header promises, checked byte by byte (rather: by granule).
  void Check() {
    const PoolSnapshot pool = set().Snapshot(kId);
    std::map<Address, Block> live;
    for (const auto& block : pool.blocks) live[block.block.address] = block.block;
    const auto granules = Granules(pool);
    std::map<PageId, Address> first;  // ranges come in the order of time
    for (const PoolSnapshot::Range& range : pool.ranges) {
      for (size_t i = 0; i < range.pages.size(); ++i) {
        first.try_emplace(range.pages[i], range.address + i * kPage);
      }
    }
    std::set<std::pair<PageId, uint64_t>> shown;
    uint64_t reserved = 0, allocated = 0, requested = 0;
    std::set<Address> live_shown;
    Address end = 0;
    void* stream_before = nullptr;
    for (const SegmentInfo& segment : Segments()) {
      EXPECT_GE(segment.address, end);
      EXPECT_TRUE(segment.address != end || segment.stream != stream_before)
          << "segments of one stream side by side are one";
      stream_before = segment.stream;
      EXPECT_EQ(segment.owner_private_pool_id, c10::MempoolId_t(kId.first, kId.second));
      EXPECT_EQ(segment.device, device_);
      EXPECT_TRUE(segment.is_large && segment.is_expandable);
      Address address = segment.address;
      uint64_t active = 0, asked = 0;
      bool was_free = false;
      for (const auto& block : segment.blocks) {
        EXPECT_EQ(block.allocated, block.active);
        EXPECT_FALSE(was_free && !block.active) << "free bytes side by side are one block";
        was_free = !block.active;
        if (block.active) {
          const auto expected = live.find(address);
          ASSERT_NE(expected, live.end()) << "no live block starts there";
          EXPECT_EQ(block.size, expected->second.bytes);
          EXPECT_EQ(block.requested_size, expected->second.requested_bytes);
          EXPECT_EQ(segment.stream, reinterpret_cast<void*>(expected->second.stream));
          live_shown.insert(address);
          active += block.size;
          asked += block.requested_size;
        }
        for (uint64_t at = 0; at < block.size; at += kGranuleBytes) {
          const auto granule = granules.find(address + at);
          ASSERT_NE(granule, granules.end()) << "nothing is mapped there";
          EXPECT_TRUE(shown.insert(granule->second).second) << "shown twice";
          EXPECT_TRUE(block.active ||
                      first.at(granule->second.first) + granule->second.second == address + at)
              << "moved";
        }
        address += block.size;
      }
      EXPECT_EQ(address - segment.address, segment.total_size);
      EXPECT_EQ(active, segment.active_size);
      EXPECT_EQ(active, segment.allocated_size);
      EXPECT_EQ(asked, segment.requested_size);
      end = address;
      reserved += segment.total_size;
      allocated += active;
      requested += asked;
    }
    EXPECT_EQ(live_shown.size(), live.size());
    EXPECT_EQ(reserved, pool.stats.reserved_bytes);
    EXPECT_EQ(allocated, pool.stats.allocated_bytes);
    EXPECT_EQ(requested, pool.stats.requested_bytes);
  }

  const c10::DeviceIndex device_ = fake_cuda::NextDevice();
  DevicePools& pools_ = DevicePools::For(device_);
  History history_;
};

TEST_F(SnapshotTest, OnePoolIsShownAlone) {
  const PoolId other{0, 2};
  Allocate(1000);
  set().EndScope(kId);
  set().BeginScope(other, ScopeKind::kCapture);
  set().Allocate(other, 3 * kPage, kStream);
  EXPECT_EQ(Segments(kId).size(), 1U);
  ASSERT_EQ(Segments(other).size(), 1U);
  EXPECT_EQ(Segments(other)[0].total_size, 3 * kPage);
  EXPECT_EQ(Segments(other)[0].owner_private_pool_id, c10::MempoolId_t(0, 2));
  EXPECT_EQ(Segments().size(), 2U);
  EXPECT_TRUE(Segments(PoolId{0, 3}).empty());
}

TEST_F(SnapshotTest, WhateverHappenedAllBytesAreShownOnce) {
  for (uint32_t seed = 1; seed <= 5; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    std::vector<Address> live;
    for (int step = 0; step < 60; ++step) {
      if (live.empty() || random() % 5 < 3) {
        const uint64_t bytes = random() % 2 == 0 ? 1 + random() % 5000 : 1 + random() % (3 * kPage);
        if (set().Stats(kId).allocated_bytes + bytes > 16 * kPage) continue;
        live.push_back(Allocate(bytes, StreamId{1 + random() % 2}));
      } else {
        const size_t index = random() % live.size();
        set().Free(live[index]);
        live[index] = live.back();
        live.pop_back();
      }
      if (step % 10 == 9) Check();
      if (HasFatalFailure()) return;
    }
    ASSERT_GT(set().Stats(kId).page_mappings, 0U);
    for (const Address address : live) set().Free(address);
    set().EndScope(kId);
    Check();
    set().Release(kId);
    set().Trim();
    set().BeginScope(kId, ScopeKind::kCapture);
  }
}

}  // namespace
}  // namespace cgp
