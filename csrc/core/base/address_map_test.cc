// How it finds and keeps what is in it, the pools of the fuzzer show.
#include "core/base/address_map.h"

#include <gtest/gtest.h>

#include <memory>

namespace cgp {
namespace {

TEST(AddressMap, HoldsValuesThatOnlyMove) {
  AddressMap<std::unique_ptr<int>> map;
  for (int i = 1; i <= 1000; ++i) {
    map.Reserve(map.size() + 1);
    map.Insert(static_cast<Address>(i) * 512, std::make_unique<int>(i));
  }
  for (int i = 1; i <= 1000; i += 2) map.Erase(static_cast<Address>(i) * 512);
  for (int i = 2; i <= 1000; i += 2) EXPECT_EQ(**map.Find(static_cast<Address>(i) * 512), i);
  EXPECT_THROW(map.Erase(512), InternalError) << "it is gone";
  EXPECT_EQ(map.size(), 500u);
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
