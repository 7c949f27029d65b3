#include "core/planning/predictor.h"

#include <algorithm>

namespace cgp {
namespace {

// A pool in which more blocks live is not planned for: a capture's cost must not grow with what
// others have left.
constexpr std::size_t kMostLiveBlocks = 4096;

}  // namespace

void Predictor::BeginCapture() {
  profile_.BeginCapture();
  plan_.reset();
  planned_ = false;
}

Predictor::Advice Predictor::Advise(uint64_t bytes, const FreeView& view,
                                    const LiveBlocks& blocks) {
  Advice advice{.match = profile_.Find(bytes), .spot = {}};
  if (profile_.steps().empty()) return advice;
  const CaptureProfile::Match& match = advice.match;
  const Granules length = Granules::FromBytesRoundedUp(bytes);
  const CaptureProfile::Step* const like = match.step ? &profile_.steps()[*match.step] : nullptr;
  advice.lives_at_peak = like != nullptr && like->lives_at_peak;
  const bool no_larger = match.scale <= 1;

  if (like != nullptr && !plan_ && no_larger &&
      Granules::FromBytesRoundedUp(like->bytes) >= length &&
      FitsWithoutWaste(view, ranges_, space_.page_size(), like->start, length)) {
    advice.spot.emplace().place = like->start;
    return advice;
  }
  if (WorthPlanning(match, length, blocks.count)) MakePlan(match, blocks);
  if (plan_ && match.step) {
    advice.spot = plan_->Find(*match.step, length, view, ranges_, MostPages(length));
    // A capture no larger than its profile finds room in what is mapped.
    if (no_larger && advice.spot && advice.spot->growth) advice.spot.reset();
  }
  return advice;
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
