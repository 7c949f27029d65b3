#include "core/leases/graph_needs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <set>
#include <vector>

namespace cgp {

bool operator==(const AddressSpan& a, const AddressSpan& b) {
  return a.begin == b.begin && a.end == b.end;
}

namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::vector<AddressSpan> NeedsOf(const GraphNeeds& needs, uint64_t capture) {
  Spans spans;
  needs.ForEach(capture, [&](AddressSpan span) { spans.push_back(span); });
  Normalise(spans);
  return spans;
}

void Capture(GraphNeeds& needs, const Spans& touched) {
  needs.BeginCapture(needs.PrepareCapture());
  for (const AddressSpan span : touched) {
    needs.ReserveTouch(1);
    needs.Touch(span);
  }
  needs.EndCapture({});
  needs.Check();
}

TEST(GraphNeedsTest, ANamedCaptureNeedsWhatItTouchedUntilItIsDropped) {
  GraphNeeds needs;
  EXPECT_EQ(needs.NameLast(), 0U);
  Capture(needs, {{8, 16}, {0, 4}, {12, 20}, {4, 6}});
  const uint64_t name = needs.NameLast();
  EXPECT_NE(name, 0U);
  EXPECT_EQ(needs.NameLast(), 0U) << "it has a name";
  EXPECT_THAT(NeedsOf(needs, name), ElementsAre(AddressSpan{0, 6}, AddressSpan{8, 20}));
  EXPECT_THAT(NeedsOf(needs, 0), IsEmpty());
  needs.Drop(name);
  EXPECT_THAT(NeedsOf(needs, name), IsEmpty());
}

TEST(GraphNeedsTest, WhatNobodyNamedStays) {
  GraphNeeds needs;
  Capture(needs, {{0, 2}});
  EXPECT_EQ(needs.unnamed(), 1U);
  Capture(needs, {{4, 6}});
  EXPECT_EQ(needs.unnamed(), 2U);
  const uint64_t second = needs.NameLast();
  EXPECT_EQ(needs.unnamed(), 1U);
  needs.Keep({{10, 12}});
  EXPECT_THAT(NeedsOf(needs, 0), ElementsAre(AddressSpan{0, 2}, AddressSpan{10, 12}));
  needs.BeginCapture(needs.PrepareCapture());
  needs.EndCapture({});
  needs.BeginCapture(needs.PrepareCapture());
  EXPECT_EQ(needs.NameLast(), 0U) << "another one has begun";
  EXPECT_THAT(NeedsOf(needs, second), ElementsAre(AddressSpan{4, 6}));
  needs.EndCapture({});
  needs.Clear();
  EXPECT_THAT(NeedsOf(needs, 0), IsEmpty());
  EXPECT_EQ(needs.unnamed(), 0U);
}

TEST(GraphNeedsTest, ManyTouchesAreAFewSpans) {
  std::mt19937 random(1);
  std::set<Address> touched;
  Spans spans;
  for (int i = 0; i < 20'000; ++i) {
    const Address begin = random() % 3'000;
    const Address end = begin + 1 + random() % 2;
    spans.push_back({begin, end});
    for (Address address = begin; address < end; ++address) touched.insert(address);
  }
  GraphNeeds needs;
  Capture(needs, spans);
  std::set<Address> needed;
  for (const AddressSpan& span : NeedsOf(needs, needs.NameLast())) {
    for (Address address = span.begin; address < span.end; ++address) needed.insert(address);
  }
  EXPECT_EQ(needed, touched);
}

}  // namespace
}  // namespace cgp
