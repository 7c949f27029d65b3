#include "testing/capture_program.h"

#include <algorithm>
#include <array>

#include "testing/text.h"

namespace cgp {
namespace {

using Kind = CaptureStep::Kind;

constexpr std::array<const char*, 17> kNames = {
    "kAllocate", "kFree",   "kRead",        "kWrite",    "kReadUnsaid", "kWriteUnsaid",
    "kUse",      "kLaunch", "kLaunchEarly", "kRecord",   "kWait",       "kWaitEarly",
    "kBeginOwn", "kEndOwn", "kInvalidate",  "kProgress", "kNextGraph"};

// Makes up one program.
class Author {
 public:
  explicit Author(uint64_t seed) : random_(seed), large_(seed % 64 == 63) {
    setup_.streams = 2 + Below(OneIn(3) ? 7 : 3);
    setup_.page_bytes = uint64_t{4096} << Below(3);
    setup_.seed = random_();
    setup_.forked = !OneIn(3);
    setup_.threads = seed % 4 == 2;
    most_live_ = uint64_t{3} << Below(4);
    small_ = Below(4);
    const auto some = [this](unsigned usual) { return OneIn(3) ? 0U : 1 + unsigned(Below(usual)); };
    Weight(Kind::kAllocate, 20 + unsigned(Below(30)));
    Weight(Kind::kFree, 10 + unsigned(Below(30)));
    Weight(Kind::kRead, 5 + unsigned(Below(30)));
    Weight(Kind::kWrite, 5 + some(20));
    Weight(Kind::kReadUnsaid, some(15));
    Weight(Kind::kWriteUnsaid, some(10));
    Weight(Kind::kUse, some(5));
    Weight(Kind::kLaunch, some(20));
    Weight(Kind::kLaunchEarly, OneIn(4) ? 1 + unsigned(Below(5)) : 0);
    Weight(Kind::kRecord, 3 + unsigned(Below(20)));
    Weight(Kind::kWait, 3 + unsigned(Below(20)));
    Weight(Kind::kWaitEarly, OneIn(6) ? 1 + unsigned(Below(3)) : 0);
    const bool bodies = OneIn(4);
    for (const Kind kind : {Kind::kBeginOwn, Kind::kEndOwn}) {
      Weight(kind, bodies ? 1 + unsigned(Below(3)) : 0);
    }
    Weight(Kind::kInvalidate, OneIn(12) ? 1 : 0);
    Weight(Kind::kProgress, some(3));
    Weight(Kind::kNextGraph, OneIn(2) ? 1 + unsigned(Below(3)) : 0);
  }

  CaptureProgram Write(CaptureProgram program) {
    program.setup = setup_;
    const uint64_t length = (uint64_t{20} << Below(5)) + Below(40);
    if (large_) AllocateForGood(&program.steps);
    // Whoever is to be given exactly what it may have shows up early.
    for (uint64_t stream = 0; setup_.forked && stream < setup_.streams; ++stream) {
      Allocate(stream, &program.steps);
    }
    while (program.steps.size() < length) Step(&program.steps);
    return program;
  }

 private:
  // Not a distribution of the library: their values differ between libraries.
  uint64_t Below(uint64_t bound) { return random_() % bound; }
  bool OneIn(uint64_t times) { return Below(times) == 0; }
  uint64_t Stream() { return Below(setup_.streams); }
  void Weight(Kind kind, unsigned weight) { weights_[static_cast<size_t>(kind)] = weight; }
  uint64_t Live() {
    return live_[OneIn(2) ? live_.size() - 1 - Below(std::min<uint64_t>(live_.size(), 3))
                          : Below(live_.size())];
  }

  uint64_t Bytes() {
    const uint64_t page = setup_.page_bytes;
    if (large_ && OneIn(2)) return page * (1 + Below(12)) - Below(page / 2);
    if (OneIn(8)) return page * (1 + Below(4)) - (OneIn(2) ? Below(page / 2) : 0);
    const uint64_t granules = page / 512;
    return small_ == 0 ? 1 + Below(page - 1)
                       : 512 * (1 + Below(granules >> std::min<uint64_t>(small_ - 1, 2)));
  }

  // A block that is never touched nor freed, so that the pool is a large one.
  void AllocateForGood(std::vector<CaptureStep>* steps) {
    const uint64_t pages = 240 + Below(800);
    steps->push_back({Kind::kAllocate, Stream(), ++last_item_, setup_.page_bytes * pages});
  }

  void Allocate(uint64_t stream, std::vector<CaptureStep>* steps) {
    steps->push_back({Kind::kAllocate, stream, ++last_item_, Bytes()});
    live_.push_back(last_item_);
    // Mostly there is something to be lost.
    if (!OneIn(5)) steps->push_back({Kind::kWrite, stream, last_item_, 0});
  }

  void Step(std::vector<CaptureStep>* steps) {
    unsigned total = 0;
    for (const unsigned weight : weights_) total += weight;
    uint64_t pick = Below(total);
    size_t which = 0;
    while (pick >= weights_[which]) pick -= weights_[which++];
    const auto kind = static_cast<Kind>(which);
    switch (kind) {
      case Kind::kAllocate:
        if (live_.size() < most_live_) Allocate(Stream(), steps);
        break;
      case Kind::kFree: {
        if (live_.empty()) break;
        const uint64_t item = Live();
        std::erase(live_, item);
        steps->push_back({kind, 0, item, 0});
        break;
      }
      case Kind::kRead:
      case Kind::kWrite:
      case Kind::kReadUnsaid:
      case Kind::kWriteUnsaid:
        if (!live_.empty()) steps->push_back({kind, Stream(), Live(), 0});
        break;
      case Kind::kUse:
        // Also by the stream that is never captured.
        if (!live_.empty()) steps->push_back({kind, Below(setup_.streams + 1), Live(), 0});
        break;
      case Kind::kRecord:
        steps->push_back({kind, Stream(), ++last_event_, 0});
        break;
      case Kind::kWait:
      case Kind::kWaitEarly:
        // Mostly for a new one; sometimes for one of long ago.
        if (last_event_ == 0) break;
        steps->push_back({kind, Stream(),
                          OneIn(4) ? 1 + Below(last_event_)
                                   : last_event_ - Below(std::min<uint64_t>(last_event_, 3)),
                          0});
        break;
      default:
        steps->push_back({kind, Stream(), 0, 0});
    }
  }

  std::mt19937_64 random_;
  const bool large_;  // large pools are given pages ahead of need
  CaptureSetup setup_;
  std::array<unsigned, 17> weights_{};
  uint64_t most_live_ = 0;
  uint64_t small_ = 0;
  std::vector<uint64_t> live_;
  uint64_t last_item_ = 0;
  uint64_t last_event_ = 0;
};

}  // namespace

std::string ToString(const CaptureStep& step) {
  return Text("{Kind::", kNames[static_cast<size_t>(step.kind)], ", ", step.stream, ", ", step.item,
              ", ", step.amount, "}");
}

std::string ToString(const std::vector<CaptureStep>& steps) {
  std::string text;
  for (const CaptureStep& step : steps) text += "    " + ToString(step) + ",\n";
  return text;
}

std::string ToString(const CaptureSetup& setup) {
  return Text("CaptureSetup{.streams = ", setup.streams, ", .page_bytes = ", setup.page_bytes,
              ", .seed = ", setup.seed, "U, .forked = ", setup.forked ? "true" : "false",
              ", .threads = ", setup.threads ? "true" : "false",
              ", .fail_each = ", setup.fail_each ? "true" : "false", "}");
}

CaptureProgram::CaptureProgram(uint64_t seed) { *this = Author(seed).Write(std::move(*this)); }

}  // namespace cgp
