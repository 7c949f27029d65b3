#include "core/base/slab_map.h"

#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <unordered_map>
#include <utility>
#include <vector>

namespace cgp {
namespace {

TEST(SlabMap, AgainstUnorderedMap) {
  std::mt19937_64 random(1);
  SlabMap<uint64_t> map;
  std::unordered_map<Address, uint64_t> model;
  std::vector<Address> live;
  for (uint64_t step = 0; step < 50'000; ++step) {
    // Long stretches of growth, then of shrinking.
    const bool grows = random() % 8 < (step / 10'000 % 2 == 0 ? 6u : 2u);
    if (grows || live.empty()) {
      const Address address = (random() % (1u << 20) + 1) * 512;
      if (model.contains(address)) continue;
      map.ReserveOne();
      map.Insert(address, step);
      model.emplace(address, step);
      live.push_back(address);
    } else {
      std::swap(live[random() % live.size()], live.back());
      map.Erase(live.back());
      model.erase(live.back());
      EXPECT_EQ(map.Find(live.back()), nullptr);
      live.pop_back();
    }
    ASSERT_EQ(map.size(), model.size());
    if (live.empty()) continue;
    const Address address = live[random() % live.size()];
    ASSERT_NE(map.Find(address), nullptr);
    ASSERT_EQ(*map.Find(address), model.at(address));
  }
  std::size_t seen = 0;
  map.ForEach([&](Address address, uint64_t value) {
    EXPECT_EQ(value, model.at(address));
    ++seen;
  });
  EXPECT_EQ(seen, model.size());
}

TEST(SlabMap, ValuesStayWhereTheyAreWhileOthersGo) {
  SlabMap<int> map;
  for (int i = 0; i < 40; ++i) {
    map.ReserveOne();
    map.Insert(static_cast<Address>(i + 1) * 512, i);
  }
  const int* const kept = map.Find(20 * 512);
  for (Address a = 1; a <= 40; ++a) {
    if (a != 20) map.Erase(a * 512);
  }
  EXPECT_EQ(map.Find(20 * 512), kept);
  EXPECT_EQ(*kept, 19);
}

TEST(SlabMap, AnErasedValueIsGoneAtOnceAndItsPlaceTakenNext) {
  const auto value = std::make_shared<int>(7);
  SlabMap<std::shared_ptr<int>> map;
  map.ReserveOne();
  map.Insert(512, value);
  const std::shared_ptr<int>* const place = map.Find(512);
  map.Erase(512);
  EXPECT_EQ(value.use_count(), 1);
  map.ReserveOne();
  map.Insert(1024, value);
  EXPECT_EQ(map.Find(1024), place);
}

}  // namespace
}  // namespace cgp
