#include "core/foresight.h"

#include <algorithm>

namespace cgp {
namespace {

// A pool in which more blocks live is not planned for: a capture's cost must not grow with what
// others have left.
constexpr std::size_t kMostLiveBlocks = 4096;

}  // namespace

void Foresight::BeginCapture() {
  guide_.BeginCapture();
  plan_.reset();
  planned_ = false;
}

Foresight::Advice Foresight::Advise(uint64_t bytes, const FreeView& view,
                                    const LiveBlocks& blocks) {
  Advice advice{.match = guide_.Find(bytes), .spot = {}};
  if (guide_.steps().empty()) return advice;
  const CaptureGuide::Match& match = advice.match;
  const Granules length = Granules::FromBytesRoundedUp(bytes);
  const CaptureGuide::Step* const like = match.step ? &guide_.steps()[*match.step] : nullptr;
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
    // A capture no larger than its guide finds room in what is mapped.
    if (no_larger && advice.spot && advice.spot->growth) advice.spot.reset();
  }
  return advice;
}

uint64_t Foresight::MostPages(Granules length) const {
  const Granules page = space_.page_size();
  const Granules live = page * space_.page_count() - space_.free() + length;
  const uint64_t needed = (live.count() + page.count() - 1) / page.count();
  return std::max<uint64_t>(space_.page_count(), needed);
}

bool Foresight::WorthPlanning(const CaptureGuide::Match& match, Granules length,
                              std::size_t live_blocks) const {
  if (planned_ || live_blocks > kMostLiveBlocks) return false;
  // A capture no larger than its guide mostly finds its places; what is small finds another.
  return match.scale > 1 || (match.step && length >= space_.page_size());
}

void Foresight::MakePlan(const CaptureGuide::Match& match, const LiveBlocks& blocks) {
  planned_ = true;
  std::vector<CapturePlan::LivePiece> live;
  blocks.for_each([&](PageId page, Granules offset, Granules length, CaptureGuide::Ticket ticket) {
    const std::optional<uint32_t> step = guide_.StepOf(ticket);
    static_assert(CaptureGuide::kNever == LayoutItem::kForever);
    const uint32_t end = step ? guide_.steps()[*step].freed_at : LayoutItem::kForever;
    live.push_back({page, offset, length, end});
  });
  plan_.emplace(guide_, match, ranges_, space_.page_size(), live);
  if (!plan_->complete()) plan_.reset();
}

}  // namespace cgp
