// Random captures: what the profile records is what was done, and a capture is aligned with it
// whatever the scale and whatever is inserted or left out.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <random>
#include <set>
#include <vector>

#include "core/planning/capture_profile.h"

namespace cgp {
namespace {

// Random captures against what a full record of them says.
TEST(CaptureProfileRandom, AgainstAFullRecord) {
  struct Entry {
    Ticket ticket;
    uint64_t bytes = 0;
    uint32_t slot = 0;
    uint32_t freed_at = CaptureProfile::kNever;
    bool lived_at_peak = false;
  };
  std::mt19937 random(3);
  const auto below = [&](std::size_t limit) { return random() % limit; };
  CaptureProfile profile;
  std::vector<Entry> largest;
  uint64_t largest_peak = 0;
  uint32_t slot = 0;
  for (int capture = 0; capture < 600; ++capture) {
    if (capture % 10 == 0) {
      profile = CaptureProfile();
      largest.clear();
      largest_peak = 0;
    }
    std::vector<Entry> entries;
    uint64_t live = 0;
    uint64_t peak = 0;
    profile.BeginCapture();
    for (std::size_t n = below(30); n > 0; --n) {
      const uint64_t bytes = 1 + below(5000);
      live += Granules::FromBytesRoundedUp(bytes).count();
      const Placement start{SlotId{slot}, Granules(slot % 7)};
      const auto ticket = profile.Allocated(profile.Find(bytes), start, bytes, Granules(live));
      entries.push_back({.ticket = ticket, .bytes = bytes, .slot = slot++});
      if (live > peak) {
        peak = live;
        for (Entry& entry : entries) entry.lived_at_peak = entry.freed_at == CaptureProfile::kNever;
      }
      Entry& freed = entries[below(entries.size())];
      if (below(2) == 0 && freed.freed_at == CaptureProfile::kNever) {
        profile.Freed(freed.ticket);
        freed.freed_at = static_cast<uint32_t>(entries.size());
        live -= Granules::FromBytesRoundedUp(freed.bytes).count();
      }
    }
    profile.EndCapture();
    if (peak >= largest_peak) {
      largest_peak = peak;
      largest = entries;
    }
    ASSERT_EQ(profile.steps().size(), largest.size());
    for (std::size_t i = 0; i < largest.size(); ++i) {
      const CaptureProfile::Step& step = profile.steps()[i];
      ASSERT_EQ(step.start.slot, SlotId{largest[i].slot});
      ASSERT_EQ(step.start.offset, Granules(largest[i].slot % 7));
      ASSERT_EQ(step.bytes, largest[i].bytes);
      ASSERT_EQ(step.freed_at, largest[i].freed_at);
      ASSERT_EQ(step.lives_at_peak, largest[i].lived_at_peak);
    }
  }
}

// A program whose blocks are `factor * batch ^ power` bytes large.
struct Block {
  uint64_t factor = 0;
  int power = 1;

  uint64_t Bytes(uint64_t batch) const {
    uint64_t bytes = factor;
    for (int i = 0; i < power; ++i) bytes *= batch;
    return bytes;
  }
};

// What a capture of it asks for: blocks of the program, by their number, and others.
struct Request {
  uint64_t bytes = 0;
  std::optional<uint32_t> block;
};

class RandomPrograms : public ::testing::TestWithParam<uint32_t> {
 protected:
  // Inclusive.
  uint64_t Between(uint64_t low, uint64_t high) { return low + random_() % (high - low + 1); }
  bool OneIn(uint64_t chances) { return Between(1, chances) == 1; }

  // The batch grows from profile_batch_ to batch_.
  uint64_t Scaled(uint64_t bytes, int power) const {
    double scaled = static_cast<double>(bytes);
    const double scale = static_cast<double>(batch_) / static_cast<double>(profile_batch_);
    for (int i = 0; i < power; ++i) scaled *= scale;
    return static_cast<uint64_t>(scaled);
  }

  // Whether nothing else in the profile may be taken for blocks of this size there, by any power.
  // If so, it is one that others must not be taken for.
  bool Unambiguous(uint64_t profile_bytes) {
    std::set<uint64_t> sizes;
    for (int power = 0; power <= 2; ++power) {
      const uint64_t granules = Scaled(profile_bytes, power) / kGranuleBytes;
      sizes.insert({granules, granules + 1, granules + 2});
    }
    const auto taken = [&](uint64_t size) { return taken_.contains(size); };
    if (std::ranges::any_of(sizes, taken)) return false;
    taken_.insert(sizes.begin(), sizes.end());
    return true;
  }

  Block NewBlock(int power) {
    for (;;) {
      Block block{.factor = 0, .power = power};
      const uint64_t unit = Block{.factor = 1, .power = power}.Bytes(profile_batch_);
      block.factor = 1 + Between(4'000'000, 4'000'000'000) / unit;
      if (block.Bytes(profile_batch_) > 2 * kGranuleBytes &&
          Unambiguous(block.Bytes(profile_batch_)))
        return block;
    }
  }

  // Another block than any of the program, in a capture of batch_.
  uint64_t OtherBytes() {
    for (;;) {
      const uint64_t bytes = Between(1'000'000, 16'000'000'000);
      if (taken_.insert(Granules::FromBytesRoundedUp(bytes).count()).second) return bytes;
    }
  }

  void MakeProgram() {
    profile_batch_ = Between(1, 64);
    do batch_ = Between(std::max<uint64_t>(1, profile_batch_ / 8), 12 * profile_batch_);
    while (batch_ == profile_batch_ && !OneIn(4));
    const uint64_t count = Between(1, 120);
    for (uint64_t i = 0; i < count; ++i) {
      // The first one grows: it sets the scale.
      program_.push_back(NewBlock(i == 0 ? 1 : static_cast<int>(Between(0, 2))));
      if (OneIn(5)) program_.push_back({.factor = Between(1, kGranuleBytes), .power = 0});
    }
  }

  // A capture that has the first block, leaves out at most 15 in a row (blocks of a granule may not
  // be found), and has others in between.
  std::vector<Request> MakeCapture() {
    std::vector<Request> requests;
    int left_out = 0;
    for (uint32_t i = 0; i < program_.size(); ++i) {
      const uint64_t bytes = program_[i].Bytes(batch_);
      const bool tells = bytes > kGranuleBytes;
      leaving_out_ = leaving_out_ ? !OneIn(10) : OneIn(12);
      if (i > 0 && left_out < 14 && leaving_out_) {
        ++left_out;
        continue;
      }
      // A block of a granule may have no like where one was inserted.
      requests.push_back({bytes, tells ? std::optional(i) : std::nullopt});
      left_out = tells ? 0 : left_out + 1;
      if (OneIn(6)) requests.push_back({OneIn(3) ? Between(1, kGranuleBytes) : OtherBytes(), {}});
    }
    return requests;
  }

  std::mt19937_64 random_{GetParam()};
  uint64_t profile_batch_ = 1;
  uint64_t batch_ = 1;
  std::set<uint64_t> taken_;  // sizes in granules
  std::vector<Block> program_;
  bool leaving_out_ = false;
};

TEST_P(RandomPrograms, EveryBlockAnswersToItsLike) {
  MakeProgram();
  CaptureProfile profile;
  profile.BeginCapture();
  for (const Block& block : program_) {
    const uint64_t bytes = block.Bytes(profile_batch_);
    profile.Allocated(profile.Find(bytes), {}, bytes, Granules(1));
  }
  profile.EndCapture();

  const std::vector<Request> capture = MakeCapture();
  profile.BeginCapture();
  for (const auto& [bytes, block] : capture) {
    const CaptureProfile::Match match = profile.Find(bytes);
    if (block || bytes > kGranuleBytes) {
      ASSERT_EQ(match.step, block)
          << bytes << " bytes, batch " << batch_ << " of " << profile_batch_;
    }
    profile.Allocated(match, {}, bytes, Granules(2));
  }
  profile.EndCapture();

  // The capture is the profile now, and predicts what a third one will ask for, where that grows by
  // the scale.
  if (batch_ == profile_batch_) return;
  const uint64_t third = Between(1, 500);
  const double scale = static_cast<double>(third) / static_cast<double>(batch_);
  for (uint32_t step = 0; step < capture.size(); ++step) {
    if (!capture[step].block || program_[*capture[step].block].power != 1) continue;
    const uint64_t bytes = program_[*capture[step].block].Bytes(third);
    // Predicted to the byte up to 2 TiB, where a double is that exact.
    if (bytes < uint64_t{1} << 41) {
      ASSERT_EQ(profile.Predict(step, scale), bytes);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomPrograms, ::testing::Range(0u, 500u));

}  // namespace
}  // namespace cgp
