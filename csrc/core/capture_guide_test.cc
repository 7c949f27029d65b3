#include "core/capture_guide.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace cgp {
namespace {

Placement At(uint32_t slot, uint64_t offset = 0) { return {SlotId{slot}, Granules(offset)}; }

// Records blocks of the given lengths, none of them freed: the pool then holds their sum.
void RecordCapture(CaptureGuide& guide, const std::vector<uint64_t>& lengths, uint32_t first_slot) {
  guide.BeginCapture();
  uint64_t live = 0;
  for (const uint64_t length : lengths) {
    live += length;
    guide.Allocated(At(first_slot++), Granules(length), Granules(live));
  }
  guide.EndCapture();
}

TEST(CaptureGuide, HasNoAdviceBeforeTheFirstCaptureIsOver) {
  CaptureGuide guide;
  EXPECT_EQ(guide.Next(), nullptr);
  guide.BeginCapture();
  EXPECT_EQ(guide.Next(), nullptr);
  guide.Allocated(At(1), Granules(4), Granules(4));
  EXPECT_EQ(guide.Next(), nullptr);
}

TEST(CaptureGuide, TellsStepByStepWhatTheLargestCaptureDid) {
  CaptureGuide guide;
  guide.BeginCapture();
  guide.Allocated(At(3, 2), Granules(4), Granules(4));
  guide.Allocated(At(9, 0), Granules(5), Granules(9));
  guide.EndCapture();

  guide.BeginCapture();
  ASSERT_NE(guide.Next(), nullptr);
  EXPECT_EQ(guide.Next()->start.slot, SlotId{3});
  EXPECT_EQ(guide.Next()->start.offset, Granules(2));
  EXPECT_EQ(guide.Next()->length, Granules(4));
  guide.Allocated(At(30), Granules(1), Granules(1));
  ASSERT_NE(guide.Next(), nullptr);
  EXPECT_EQ(guide.Next()->start.slot, SlotId{9});
  EXPECT_EQ(guide.Next()->length, Granules(5));
  guide.Allocated(At(31), Granules(1), Granules(2));
  EXPECT_EQ(guide.Next(), nullptr) << "the largest capture had two steps";
}

TEST(CaptureGuide, TheLargestCaptureIsTheGuide) {
  CaptureGuide guide;
  RecordCapture(guide, {10, 10}, 100);
  RecordCapture(guide, {1, 1, 1, 1}, 200);
  guide.BeginCapture();
  EXPECT_EQ(guide.Next()->start.slot, SlotId{100}) << "more steps are not more memory";
  guide.EndCapture();
  RecordCapture(guide, {21}, 300);
  guide.BeginCapture();
  EXPECT_EQ(guide.Next()->start.slot, SlotId{300});
}

TEST(CaptureGuide, OfEquallyLargeCapturesTheLastIsTheGuide) {
  CaptureGuide guide;
  RecordCapture(guide, {10, 10}, 100);
  RecordCapture(guide, {20}, 200);
  guide.BeginCapture();
  EXPECT_EQ(guide.Next()->start.slot, SlotId{200});
}

// What counts is what the pool held at once, not the sum over the capture.
TEST(CaptureGuide, SizeOfACaptureIsItsPeak) {
  CaptureGuide guide;
  RecordCapture(guide, {20}, 100);
  guide.BeginCapture();
  for (uint32_t i = 0; i < 5; ++i)
    guide.Freed(guide.Allocated(At(200 + i), Granules(19), Granules(19)));
  guide.EndCapture();
  guide.BeginCapture();
  EXPECT_EQ(guide.Next()->start.slot, SlotId{100});
}

TEST(CaptureGuide, AnEmptyCaptureDoesNotReplaceAGuide) {
  CaptureGuide guide;
  RecordCapture(guide, {4}, 100);
  RecordCapture(guide, {}, 200);
  guide.BeginCapture();
  ASSERT_NE(guide.Next(), nullptr);
  EXPECT_EQ(guide.Next()->start.slot, SlotId{100});
}

// lives_at_peak of each step of the guide, asked for in a capture that repeats it.
std::vector<bool> LivesAtPeak(CaptureGuide& guide) {
  std::vector<bool> lives;
  guide.BeginCapture();
  while (const CaptureGuide::Step* step = guide.Next()) {
    lives.push_back(step->lives_at_peak);
    guide.Allocated(step->start, step->length, Granules(0));
  }
  guide.EndCapture();
  return lives;
}

TEST(CaptureGuide, MarksWhatLivesWhenTheCaptureHoldsMost) {
  CaptureGuide guide;
  guide.BeginCapture();
  const auto early = guide.Allocated(At(0), Granules(4), Granules(4));
  guide.Freed(early);  // before the peak
  const auto at_peak = guide.Allocated(At(1), Granules(6), Granules(6));
  const auto just_before = guide.Allocated(At(2), Granules(1), Granules(7));
  guide.Freed(just_before);
  guide.Allocated(At(3), Granules(8), Granules(14));  // the peak; never freed
  guide.Freed(at_peak);                               // right after it
  guide.Allocated(At(4), Granules(5), Granules(13));  // after the peak
  guide.EndCapture();
  EXPECT_EQ(LivesAtPeak(guide), (std::vector<bool>{false, true, false, true, false}));
}

TEST(CaptureGuide, OfEqualPeaksTheFirstCounts) {
  CaptureGuide guide;
  guide.BeginCapture();
  const auto first = guide.Allocated(At(0), Granules(8), Granules(8));
  guide.Freed(first);
  guide.Allocated(At(1), Granules(8), Granules(8));
  guide.EndCapture();
  EXPECT_EQ(LivesAtPeak(guide), (std::vector<bool>{true, false}));
}

TEST(CaptureGuide, TicketsOfEarlierCapturesAreIgnored) {
  CaptureGuide guide;
  guide.BeginCapture();
  const auto old = guide.Allocated(At(0), Granules(4), Granules(4));
  guide.EndCapture();

  guide.BeginCapture();
  guide.Allocated(At(1), Granules(6), Granules(10));
  guide.Freed(old);  // its step number is that of the block just recorded
  guide.Allocated(At(2), Granules(7), Granules(13));
  guide.EndCapture();
  EXPECT_EQ(LivesAtPeak(guide), (std::vector<bool>{true, true}));
}

TEST(CaptureGuide, WhatIsFreedBetweenCapturesIsIgnored) {
  CaptureGuide guide;
  guide.BeginCapture();
  const auto ticket = guide.Allocated(At(0), Granules(4), Granules(4));
  guide.EndCapture();
  guide.Freed(ticket);
  EXPECT_EQ(LivesAtPeak(guide), std::vector<bool>{true});
}

TEST(CaptureGuide, BlocksWithoutATicketAreIgnored) {
  CaptureGuide guide;
  guide.Freed({});
  guide.BeginCapture();
  guide.Allocated(At(0), Granules(4), Granules(4));
  guide.Freed({});
  guide.EndCapture();
  EXPECT_EQ(LivesAtPeak(guide), std::vector<bool>{true});
}

// Random captures against what a full record of them says.
TEST(CaptureGuide, AgainstAFullRecord) {
  struct Entry {
    CaptureGuide::Ticket ticket;
    uint64_t length = 0;
    uint32_t slot = 0;
    bool live = true;
    bool lived_at_peak = false;
  };
  std::mt19937 random(3);
  const auto below = [&](std::size_t limit) { return random() % limit; };
  CaptureGuide guide;
  std::vector<Entry> largest;
  uint64_t largest_peak = 0;
  uint32_t slot = 0;
  for (int capture = 0; capture < 600; ++capture) {
    if (capture % 10 == 0) {
      guide = CaptureGuide();
      largest.clear();
      largest_peak = 0;
    }
    std::vector<Entry> entries;
    uint64_t live = 0;
    uint64_t peak = 0;
    guide.BeginCapture();
    for (std::size_t n = below(30); n > 0; --n) {
      const CaptureGuide::Step* advice = guide.Next();
      ASSERT_EQ(advice != nullptr, entries.size() < largest.size());
      if (advice != nullptr) {
        const Entry& expected = largest[entries.size()];
        ASSERT_EQ(advice->start.slot, SlotId{expected.slot});
        ASSERT_EQ(advice->length, Granules(expected.length));
        ASSERT_EQ(advice->lives_at_peak, expected.lived_at_peak);
      }
      const uint64_t length = 1 + below(9);
      live += length;
      const auto ticket = guide.Allocated(At(slot), Granules(length), Granules(live));
      entries.push_back({.ticket = ticket, .length = length, .slot = slot++});
      if (live > peak) {
        peak = live;
        for (Entry& entry : entries) entry.lived_at_peak = entry.live;
      }
      Entry& freed = entries[below(entries.size())];
      if (below(2) == 0 && freed.live) {
        guide.Freed(freed.ticket);
        freed.live = false;
        live -= freed.length;
      }
    }
    guide.EndCapture();
    if (peak < largest_peak) continue;
    largest_peak = peak;
    largest = entries;
  }
}

}  // namespace
}  // namespace cgp
