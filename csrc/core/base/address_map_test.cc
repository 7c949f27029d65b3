#include "core/base/address_map.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <unordered_map>
#include <vector>

namespace cgp {
namespace {

// Addresses that hash to `home` of 64 places. It repeats the map's hash: with another one the tests
// below still hold, but provoke nothing.
std::vector<Address> AddressesWithHome(uint64_t home, std::size_t count) {
  std::vector<Address> found;
  for (Address granule = 1; found.size() < count; ++granule) {
    if ((granule * 0x9E3779B97F4A7C15ull) >> 58 == home) found.push_back(granule * 512);
  }
  return found;
}

// The map beside the one it must equal.
struct MapAndModel {
  AddressMap<int> map;
  std::unordered_map<Address, int> model;

  void Insert(Address address, int value) {
    map.Reserve(map.size() + 1);
    map.Insert(address, value);
    model.emplace(address, value);
  }

  void Erase(Address address) {
    map.Erase(address);
    model.erase(address);
  }

  void ExpectEqualAt(Address address) const {
    const int* found = map.Find(address);
    const auto expected = model.find(address);
    ASSERT_EQ(found != nullptr, expected != model.end()) << "address " << address;
    if (found == nullptr) return;
    ASSERT_EQ(*found, expected->second) << "address " << address;
  }

  void ExpectForEachVisitsAll() const {
    std::unordered_map<Address, int> visited;
    map.ForEach([&](Address address, int value) {
      EXPECT_TRUE(visited.emplace(address, value).second) << "twice: " << address;
    });
    EXPECT_EQ(visited, model);
  }
};

TEST(AddressMap, HoldsValuesThatOnlyMove) {
  AddressMap<std::unique_ptr<int>> map;
  for (int i = 1; i <= 1000; ++i) {
    map.Reserve(map.size() + 1);
    map.Insert(static_cast<Address>(i) * 512, std::make_unique<int>(i));
  }
  for (int i = 1; i <= 1000; i += 2) map.Erase(static_cast<Address>(i) * 512);
  for (int i = 2; i <= 1000; i += 2) EXPECT_EQ(**map.Find(static_cast<Address>(i) * 512), i);
  EXPECT_EQ(map.size(), 500u);
}

TEST(AddressMap, ErasingAnUnknownAddressThrowsAndKeepsTheRest) {
  MapAndModel both;
  const std::vector<Address> addresses = AddressesWithHome(63, 4);
  for (int i = 0; i < 3; ++i) both.Insert(addresses[static_cast<std::size_t>(i)], i);
  EXPECT_THROW(both.map.Erase(addresses[3]), InternalError);
  EXPECT_EQ(both.map.size(), 3u);
  for (const Address address : addresses) both.ExpectEqualAt(address);
}

TEST(AddressMap, AddressZeroIsNeverThere) {
  AddressMap<int> map;
  EXPECT_EQ(map.Find(AddressMap<int>::kEmpty), nullptr);
  map.Reserve(map.size() + 1);
  map.Insert(512, 1);
  EXPECT_EQ(map.Find(AddressMap<int>::kEmpty), nullptr) << "it marks an empty place";
  EXPECT_THROW(map.Erase(AddressMap<int>::kEmpty), InternalError);
  EXPECT_EQ(map.size(), 1u);
}

// As full as the table gets (3/4), every entry in one cluster that wraps round.
TEST(AddressMap, CrowdedClusterAgainstUnorderedMap) {
  std::vector<Address> keys;
  for (const uint64_t home : {60u, 62u, 63u, 0u, 2u}) {
    for (const Address address : AddressesWithHome(home, 9)) keys.push_back(address);
  }
  std::mt19937 random(1);
  MapAndModel both;
  for (int step = 0; step < 20'000; ++step) {
    const Address key = keys[random() % keys.size()];
    if (both.model.contains(key)) {
      both.Erase(key);
    } else {
      both.Insert(key, step);
    }
    ASSERT_EQ(both.map.size(), both.model.size());
    for (const Address each : keys) both.ExpectEqualAt(each);
    if (HasFatalFailure()) FAIL() << "at step " << step;
  }
}

TEST(AddressMap, GrowingAndShrinkingAgainstUnorderedMap) {
  std::mt19937_64 random(2);
  MapAndModel both;
  std::vector<Address> live;
  for (int step = 0; step < 100'000; ++step) {
    // Long stretches of growth, then of shrinking.
    const bool grows = random() % 8 < (step / 20'000 % 2 == 0 ? 6u : 2u);
    if (grows || live.empty()) {
      const Address address = (random() % (1u << 20) + 1) * 512;
      if (both.model.contains(address)) continue;
      both.Insert(address, step);
      live.push_back(address);
    } else {
      std::swap(live[random() % live.size()], live.back());
      both.Erase(live.back());
      both.ExpectEqualAt(live.back());
      live.pop_back();
    }
    if (!live.empty()) both.ExpectEqualAt(live[random() % live.size()]);
    ASSERT_EQ(both.map.size(), both.model.size());
  }
  for (const Address address : live) both.ExpectEqualAt(address);
  both.ExpectForEachVisitsAll();
}

TEST(AddressMap, AnErasedValueIsGoneAtOnceAndItsPlaceTakenNext) {
  const auto value = std::make_shared<int>(7);
  AddressMap<std::shared_ptr<int>> map;
  map.Reserve(map.size() + 1);
  map.Insert(512, value);
  const std::shared_ptr<int>* const place = map.Find(512);
  map.Erase(512);
  EXPECT_EQ(value.use_count(), 1);
  map.Reserve(map.size() + 1);
  map.Insert(1024, value);
  EXPECT_EQ(map.Find(1024), place);
}

}  // namespace
}  // namespace cgp
