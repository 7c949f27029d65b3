#include "core/planning/predictor.h"

#include <algorithm>

namespace cgp {
namespace {

// A pool in which more blocks live is not planned for: a capture's cost must not grow with what
// others have left.
constexpr std::size_t kMostLiveBlocks = 4096;

// A pool of fewer pages has little to map, and a page more of it than it needs is more than 3 %.
constexpr uint32_t kFewPages = 32;

// What is longer than whole pages by less than this part of one leaves nearly all of another over, where
// nothing adjoins.
constexpr uint64_t kPartOfPage = 16;

}  // namespace

void Predictor::BeginCapture() {
  profile_.BeginCapture();
  plan_.reset();
  planned_ = false;
  places_.Clear();
}

Predictor::Advice Predictor::Advise(uint64_t bytes, const FreeView& view,
                                    const LiveBlocks& blocks) {
  Advice advice{.match = profile_.Find(bytes), .spot = {}};
  const Granules length = Granules::FromBytesRoundedUp(bytes);
  if (const auto step = advice.match.step)
    advice.lives_at_peak = profile_.steps()[*step].lives_at_peak;
  advice.spot = Foreseen(advice.match, length, view, blocks);
  if (!advice.spot) advice.spot = Known(length, view);
  return advice;
}

// What the captures before say.
std::optional<CapturePlan::Spot> Predictor::Foreseen(const CaptureProfile::Match& match,
                                                     Granules length, const FreeView& view,
                                                     const LiveBlocks& blocks) {
  const CaptureProfile::Step* const like = match.step ? &profile_.steps()[*match.step] : nullptr;
  const bool no_larger = match.scale <= 1;
  if (like != nullptr && !plan_ && no_larger &&
      Granules::FromBytesRoundedUp(like->bytes) >= length &&
      FitsWithoutWaste(view, ranges_, space_.page_size(), like->start, length)) {
    return CapturePlan::Spot{.growth = {}, .place = like->start};
  }
  if (WorthPlanning(match, length, blocks.count)) MakePlan(match, blocks);
  if (!plan_ || !match.step) return std::nullopt;
  auto spot = plan_->Find(*match.step, length, view, ranges_, MostPages(length));
  // A capture no larger than its profile finds room in what is mapped.
  if (no_larger && spot && spot->growth) return std::nullopt;
  return spot;
}

// What the capture itself says.
std::optional<CapturePlan::Spot> Predictor::Known(Granules length, const FreeView& view) const {
  if (space_.page_count() < kFewPages) return std::nullopt;
  const bool small = length < space_.page_size();
  if (small && view.BestFit(length)) return std::nullopt;
  const Granules page = space_.page_size();
  const Granules rest = length % page;
  const bool touches = rest > Granules(0) && rest * kPartOfPage < page;
  const auto place = places_.Find(length, [&](Placement start) {
    const bool fits = small ? WholePagesAt(view, ranges_, page, start, length) == 0
                            : FitsWithoutWaste(view, ranges_, page, start, length);
    return fits && (!touches || TouchesUsed(view, ranges_, page, start, length));
  });
  if (!place) return std::nullopt;
  return CapturePlan::Spot{.growth = {}, .place = *place};
}

void Predictor::ReserveOne(uint64_t bytes) {
  profile_.ReserveOne();
  places_.Reserve(Granules::FromBytesRoundedUp(bytes));
}

Ticket Predictor::Allocated(const Advice& advice, Placement start, uint64_t bytes, Granules live) {
  const Granules length = Granules::FromBytesRoundedUp(bytes);
  const bool in_one_page = start.offset + length <= space_.page_size();
  if (length >= space_.page_size() || !in_one_page) places_.Add(length, start);
  return profile_.Allocated(advice.match, start, bytes, live);
}

uint64_t Predictor::MostPages(Granules length) const {
  const Granules page = space_.page_size();
  const Granules live = page * space_.page_count() - space_.free() + length;
  const uint64_t needed = (live.count() + page.count() - 1) / page.count();
  return std::max<uint64_t>(space_.page_count(), needed);
}

bool Predictor::WorthPlanning(const CaptureProfile::Match& match, Granules length,
                              std::size_t live_blocks) const {
  if (planned_ || live_blocks > kMostLiveBlocks) return false;
  // A capture no larger than its profile mostly finds its places; what is small finds another.
  return match.scale > 1 || (match.step && length >= space_.page_size());
}

void Predictor::MakePlan(const CaptureProfile::Match& match, const LiveBlocks& blocks) {
  planned_ = true;
  std::vector<CapturePlan::LivePiece> live;
  blocks.for_each([&](PageId page, Granules offset, Granules length, Ticket ticket) {
    const std::optional<uint32_t> step = profile_.StepOf(ticket);
    static_assert(CaptureProfile::kNever == LayoutItem::kForever);
    const uint32_t end = step ? profile_.steps()[*step].freed_at : LayoutItem::kForever;
    live.push_back({page, offset, length, end});
  });
  plan_.emplace(profile_, match, ranges_, space_.page_size(), live);
  if (!plan_->complete()) plan_.reset();
}

}  // namespace cgp
