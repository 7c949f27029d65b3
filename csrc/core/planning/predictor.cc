#include "core/planning/predictor.h"

#include <algorithm>
#include <vector>

namespace cgp {
namespace {

// A pool in which more blocks live is not planned for: a capture's cost must not grow with what
// others have left.
constexpr std::size_t kMostLiveBlocks = 4096;

// A pool of fewer pages has little to map, and a page more of it than it needs is more than 3 %.
constexpr uint32_t kFewPages = 32;

// What is longer than whole pages by less than this part of one leaves nearly all of another over,
// where nothing adjoins.
constexpr uint64_t kPartOfPage = 16;

}  // namespace

void Predictor::BeginScope(ScopeKind kind) {
  profile_.BeginCapture();
  plan_.reset();
  planned_ = false;
  places_.Clear();
  active_ = true;
  kind_ = kind;
}

void Predictor::EndScope() {
  if (active_) profile_.EndCapture();
  active_ = false;
}

void Predictor::Stop() {
  if (active_) profile_.AbandonCapture();
  active_ = false;
}

void Predictor::Renumber(const RangeTable::Renumbering& renumbering) {
  profile_.Renumber(renumbering);
  plan_.reset();
  places_.Clear();
}

Predictor::Advice Predictor::Advise(uint64_t bytes, const FreeView& view) {
  Advice advice{.match = profile_.Find(bytes), .spot = {}};
  const Granules length = Granules::FromBytesRoundedUp(bytes);
  if (const auto step = advice.match.step)
    advice.lives_at_peak = profile_.steps()[*step].lives_at_peak;
  advice.spot = Predicted(advice.match, length, view);
  if (!advice.spot) advice.spot = Known(length, view);
  return advice;
}

// What the captures before say.
std::optional<CapturePlan::Spot> Predictor::Predicted(const CaptureProfile::Match& match,
                                                      Granules length, const FreeView& view) {
  const CaptureProfile::Step* const like = match.step ? &profile_.steps()[*match.step] : nullptr;
  const bool no_larger = match.scale <= 1;
  if (like != nullptr && like->has_place() && !plan_ && no_larger &&
      Granules::FromBytesRoundedUp(like->bytes) >= length &&
      FitsWithoutWaste(view, like->start, length)) {
    return CapturePlan::Spot{.growth = {}, .place = like->start};
  }
  if (WorthPlanning(match, length)) MakePlan(match, view.ranges());
  if (!plan_ || !match.step) return std::nullopt;
  auto spot = plan_->Find(*match.step, length, view, MostPages(length));
  // A capture no larger than its profile finds room in what is mapped.
  if (no_larger && spot && spot->growth) return std::nullopt;
  return spot;
}

// What the capture itself says.
std::optional<CapturePlan::Spot> Predictor::Known(Granules length, const FreeView& view) const {
  if (bytes_.space().page_count() < kFewPages) return std::nullopt;
  const Granules page = bytes_.page_size();
  const bool small = length < page;
  if (small && view.BestFit(length)) return std::nullopt;
  const Granules rest = length % page;
  const bool touches = rest > Granules(0) && rest * kPartOfPage < page;
  const auto place = places_.Find(length, [&](Placement start) {
    const bool fits =
        small ? WholePagesAt(view, start, length) == 0 : FitsWithoutWaste(view, start, length);
    return fits && (!touches || TouchesUsed(view, start, length));
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
  const bool in_one_page = start.offset + length <= bytes_.page_size();
  if (length >= bytes_.page_size() || !in_one_page) places_.Add(length, start);
  const Ticket ticket = profile_.Allocated(advice.match, start, bytes, live);
  if (kind_ == ScopeKind::kEager && ticket.step == kMostEager) Stop();
  return ticket;
}

uint64_t Predictor::MostPages(Granules length) const {
  const PageSpace& space = bytes_.space();
  const Granules live = space.page_size() * space.page_count() - space.free() + length;
  return std::max<uint64_t>(space.page_count(), PagesFor(live, space.page_size()));
}

bool Predictor::WorthPlanning(const CaptureProfile::Match& match, Granules length) const {
  if (planned_ || blocks_.size() > kMostLiveBlocks) return false;
  // A plan takes milliseconds, which a loop of eager scopes would pay each time.
  if (kind_ == ScopeKind::kEager) return false;
  // A capture no larger than its profile mostly finds its places; what is small finds another.
  return match.scale > 1 || (match.step && length >= bytes_.page_size());
}

void Predictor::MakePlan(const CaptureProfile::Match& match, const RangeTable& ranges) {
  planned_ = true;
  std::vector<CapturePlan::LivePiece> live;
  blocks_.ForEach([&](Address, const LiveBlock& block) {
    const std::optional<uint32_t> step = profile_.StepOf(block.ticket);
    const uint32_t end = step ? profile_.steps()[*step].freed_at : CaptureProfile::kNever;
    bytes_.ForEachPiece(block.site, block.length(),
                        [&](PageId page, Granules offset, Granules length) {
                          live.push_back({page, offset, length, end});
                        });
  });
  plan_.emplace(profile_, match, ranges, bytes_.page_size(), live);
  if (!plan_->complete()) plan_.reset();
}

}  // namespace cgp
