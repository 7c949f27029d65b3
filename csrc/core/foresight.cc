#include "core/foresight.h"

#include <new>

namespace cgp {
namespace {

// A guide that needs more plans for a capture is none.
constexpr int kMostPlans = 3;
// Nor one that this many blocks did not answer to when the plan is to be made.
constexpr uint32_t kMostMissed = 2;
// A larger scale is more likely a mistake.
constexpr double kLargestScale = 16;
// After so much evidence a plan is trusted with all the pages it wants.
constexpr uint32_t kTrusted = 3;

}  // namespace

void Foresight::BeginCapture() {
  guide_.BeginCapture();
  plan_.reset();
  refused_ = false;
  plans_left_ = kMostPlans;
  pages_before_ = ranges_.page_count();
}

Foresight::Advice Foresight::Advise(uint64_t bytes, const FreeView& view,
                                    const ForEachLive& for_each_live) {
  Advice advice{.match = guide_.Find(bytes), .spot = {}};
  if (guide_.steps().empty()) return advice;
  const CaptureGuide::Match& match = advice.match;
  const Granules length = Granules::FromBytesRoundedUp(bytes);
  const CaptureGuide::Step* const like = match.step ? &guide_.steps()[*match.step] : nullptr;
  advice.lives_at_peak = like != nullptr && like->lives_at_peak;

  std::optional<Placement> place;
  if (like != nullptr && !plan_ && match.scale <= 1 &&
      Granules::FromBytesRoundedUp(like->bytes) >= length &&
      FitsAt(view, ranges_, space_.page_size(), like->start, length)) {
    place = like->start;
  } else if (length < space_.page_size() &&
             (like == nullptr || like->freed_at == CaptureGuide::kNever)) {
    place = BesideSurvivors(length, view);
  }
  if (place) {
    advice.spot.emplace().place = *place;
    return advice;
  }
  if (WorthPlanning(match, length)) MakePlan(match, view, for_each_live);
  if (plan_ && plan_->scale() != match.scale) plan_.reset();
  if (plan_ && plan_->complete()) {
    advice.spot = plan_->Find(match, length, view, ranges_, MostPages(match, length));
    // A capture no larger than its guide finds room in what is mapped.
    if (match.scale <= 1 && advice.spot && advice.spot->growth) advice.spot.reset();
    advice.planned = advice.spot.has_value();
    refused_ |= !advice.planned && !Trusts(match);
  }
  return advice;
}

CaptureGuide::Ticket Foresight::Allocated(const Advice& advice, Placement start, uint64_t bytes,
                                          Granules live) {
  try {
    if (advice.planned && plan_) plan_->Take(advice.match, *advice.spot, start, ranges_);
  } catch (const std::bad_alloc&) {
    GiveUpPlan();  // the capture goes on without
  }
  return guide_.Allocated(advice.match, start, bytes, live);
}

void Foresight::GiveUpPlan() {
  plan_.reset();
  plans_left_ = 0;
}

bool Foresight::WorthPlanning(const CaptureGuide::Match& match, Granules length) const {
  if (plans_left_ == 0 || match.missed > kMostMissed) return false;
  // What was refused lies elsewhere now, and is in the way of what is foretold.
  if (plan_ && plan_->scale() == match.scale) return refused_ && Trusts(match);
  if (match.scale > 1) return guide_.learned() && match.scale <= kLargestScale;
  // A capture no larger than its guide mostly finds its places; what is small finds another.
  return match.scale == 0 || (match.step && length >= space_.page_size());
}

bool Foresight::Trusts(const CaptureGuide::Match& match) const {
  return match.evidence >= kTrusted && match.missed < match.evidence;
}

void Foresight::MakePlan(const CaptureGuide::Match& match, const FreeView& view,
                         const ForEachLive& for_each_live) {
  std::vector<CapturePlan::LivePiece> live;
  for_each_live([&](PageId page, Granules offset, Granules length, CaptureGuide::Ticket ticket) {
    const std::optional<uint32_t> step = guide_.StepOf(ticket);
    static_assert(CaptureGuide::kNever == LayoutItem::kForever);
    const uint32_t end = step ? guide_.steps()[*step].freed_at : LayoutItem::kForever;
    live.push_back({page, offset, length, end});
  });
  plan_.emplace(guide_, match, view, ranges_, space_.page_size(), live);
  --plans_left_;
  refused_ = false;
  // A capture no larger than its guide does without: mapping most of the pool into a home costs more
  // than the few blocks that did not find their place.
  if (match.scale <= 1 &&
      (!plan_->complete() || plan_->missing_handles() * 4 > ranges_.handle_count()))
    GiveUpPlan();
}

uint64_t Foresight::MostPages(const CaptureGuide::Match& match, Granules length) const {
  const uint64_t after = plan_->pages_after();
  if (Trusts(match)) return after;
  // What lives has to lie somewhere, with a plan or without.
  const Granules page = space_.page_size();
  const Granules live = page * space_.page_count() - space_.free() + length;
  const uint64_t needed = (live.count() + page.count() - 1) / page.count();
  return std::min(after, std::max(pages_before_ + pages_before_ / 64 + 1, needed));
}

std::optional<Placement> Foresight::BesideSurvivors(Granules length, const FreeView& view) const {
  const std::optional<NodeId> node = view.BestFitSettled(length);
  if (!node) return std::nullopt;
  const PageSpace::Node& free = space_.node(*node);
  return Placement{ranges_.slots_of(free.page).front(), Granules(free.offset)};
}

}  // namespace cgp
