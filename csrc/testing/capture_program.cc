#include "testing/capture_program.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace cgp {
namespace {

using enum Step::Kind;

// Makes up one program.
class Author {
 public:
  explicit Author(uint64_t seed) : dice_(seed), large_(seed % 64 == 63) {
    setup_.streams = 2 + dice_.Below(dice_.OneIn(3) ? 7 : 3);
    setup_.page_bytes = uint64_t{4096} << dice_.Below(3);
    setup_.seed = dice_.Any();
    setup_.one_pool = true;
    setup_.forked = !dice_.OneIn(3);
    setup_.threads = seed % 4 == 2;
    most_live_ = uint64_t{3} << dice_.Below(4);
    small_ = dice_.Below(4);
    const auto up_to = [this](unsigned most) { return 1 + unsigned(dice_.Below(most)); };
    weights_[kAllocate] = 19 + up_to(30);
    weights_[kFree] = 9 + up_to(30);
    weights_[kRead] = 4 + up_to(30);
    weights_[kWrite] = 5 + dice_.Some(20);
    weights_[kReadUnsaid] = dice_.Some(15);
    weights_[kWriteUnsaid] = dice_.Some(10);
    weights_[kUse] = dice_.Some(5);
    weights_[kLaunch] = dice_.Some(20);
    weights_[kLaunchEarly] = dice_.OneIn(4) ? up_to(5) : 0;
    weights_[kRecord] = 2 + up_to(20);
    weights_[kWait] = 2 + up_to(20);
    weights_[kWaitEarly] = dice_.OneIn(6) ? up_to(3) : 0;
    const bool bodies = dice_.OneIn(4);
    weights_[kBeginOwn] = bodies ? up_to(3) : 0;
    weights_[kEndOwn] = bodies ? up_to(3) : 0;
    weights_[kInvalidate] = dice_.OneIn(12) ? 1 : 0;
    weights_[kProgress] = dice_.Some(3);
    weights_[kNextGraph] = dice_.OneIn(2) ? up_to(3) : 0;
  }

  Steps Write() {
    Add(kBeginCapture, 0);
    const uint64_t length = (uint64_t{20} << dice_.Below(5)) + dice_.Below(40);
    // A block that is never touched nor freed, so that the pool is a large one.
    if (large_) {
      const uint64_t pages = 240 + dice_.Below(800);
      Add(kAllocate, Stream(), ++last_item_, setup_.page_bytes * pages);
    }
    // Whoever is to be given exactly what it may have shows up early.
    for (uint64_t stream = 0; setup_.forked && stream < setup_.streams; ++stream) Allocate(stream);
    while (steps_.size() <= length) AddSome(weights_.Pick(dice_));
    if (!large_ && dice_.OneIn(3)) Repeat();
    return std::move(steps_);
  }
  const FuzzSetup& setup() const { return setup_; }

 private:
  uint64_t Stream() { return dice_.Below(setup_.streams); }
  void Add(Step::Kind kind, uint64_t stream, uint64_t item = 0, uint64_t amount = 0) {
    steps_.push_back({kind, stream, item, amount});
  }

  uint64_t Bytes() {
    const uint64_t page = setup_.page_bytes;
    if (large_ && dice_.OneIn(2)) return page * (1 + dice_.Below(12)) - dice_.Below(page / 2);
    if (dice_.OneIn(8))
      return page * (1 + dice_.Below(4)) - (dice_.OneIn(2) ? dice_.Below(page / 2) : 0);
    const uint64_t granules = page / 512;
    return small_ == 0 ? 1 + dice_.Below(page - 1)
                       : 512 * (1 + dice_.Below(granules >> std::min<uint64_t>(small_ - 1, 2)));
  }

  void Allocate(uint64_t stream) {
    Add(kAllocate, stream, ++last_item_, Bytes());
    live_.push_back(last_item_);
    // Mostly there is something to be lost.
    if (!dice_.OneIn(5)) Add(kWrite, stream, last_item_);
  }

  void AddSome(Step::Kind kind) {
    const bool uses = kind == kRead || kind == kWrite || kind == kReadUnsaid ||
                      kind == kWriteUnsaid || kind == kUse;
    if (kind == kAllocate) {
      if (live_.size() < most_live_) Allocate(Stream());
    } else if (kind == kFree) {
      if (live_.empty()) return;
      Add(kind, 0, dice_.NewOf(live_, 3));
      std::erase(live_, steps_.back().item);
    } else if (uses) {
      if (live_.empty()) return;
      // Used, but not touched, also by the stream that is never captured.
      const uint64_t stream = dice_.Below(setup_.streams + (kind == kUse ? 1 : 0));
      Add(kind, stream, dice_.NewOf(live_, 3));
    } else if (kind == kWait || kind == kWaitEarly) {
      if (last_event_ == 0) return;
      const uint64_t stream = Stream();
      // Mostly for a new one; sometimes for one of long ago.
      Add(kind, stream,
          dice_.OneIn(4) ? 1 + dice_.Below(last_event_)
                         : last_event_ - dice_.Below(std::min<uint64_t>(last_event_, 3)));
    } else if (kind == kRecord) {
      Add(kind, Stream(), ++last_event_);
    } else {
      // Sleeps between some graphs, and is trimmed between others.
      Add(kind, Stream(), 0, kind == kProgress ? 1 : kind == kNextGraph ? dice_.Below(4) : 0);
    }
  }

  // The same graphs once more and again, larger or smaller, as a program does that is captured for
  // several sizes: what is alike in them goes where it lay.
  void Repeat() {
    const Steps once = steps_;
    const uint64_t items = std::max(last_item_, last_event_);
    for (uint64_t time = 1, scale = 1; time < 4; ++time) {
      scale = dice_.OneIn(3) ? 1 : 2 * scale;
      Add(kNextGraph, 0);
      for (Step step : once) {
        if (step.kind == kBeginCapture) continue;
        step.item += time * items;
        if (step.amount > setup_.page_bytes / 4) step.amount *= scale;
        steps_.push_back(step);
      }
    }
  }

  Dice dice_;
  const bool large_;  // large pools are given pages ahead of need
  FuzzSetup setup_;
  Weights weights_;
  Steps steps_;
  uint64_t most_live_ = 0;
  uint64_t small_ = 0;
  std::vector<uint64_t> live_;
  uint64_t last_item_ = 0;
  uint64_t last_event_ = 0;
};

}  // namespace

CaptureProgram::CaptureProgram(uint64_t seed) {
  Author author(seed);
  setup = author.setup();
  steps = author.Write();
}

}  // namespace cgp
