#include "testing/reuse_oracle.h"

#include <algorithm>

#include "testing/text.h"

namespace cgp {
namespace {

constexpr uint64_t kGranule = 512;

}  // namespace

ReuseOracle::ReuseOracle(const CaptureDag& dag, const DriverWatch& watch, uint64_t page_bytes)
    : dag_(dag), watch_(watch), page_bytes_(page_bytes) {}

void ReuseOracle::BeginScope() {
  for (const auto& fence : unmarked_) fence->mark = watch_.TakeMark();
  unmarked_.clear();
  ++scope_;
  in_scope_ = true;
  captures_ = 0;
  told_.clear();
}

void ReuseOracle::EndScope() {
  in_scope_fences_.clear();
  seen_.clear();
  in_scope_ = false;
}

void ReuseOracle::See(StreamId stream) {
  if (!seen_.insert(stream).second || seen_.size() != 2) return;
  for (const auto& fence : in_scope_fences_) {
    fence->promised = fence->promised && seen_.contains(fence->home) && fence->home != stream;
    fence->late = dag_.At(fence->home).nodes;
  }
}

bool ReuseOracle::Allowed(const Granule& granule, StreamId stream) const {
  if (granule.used) return false;
  if (granule.fence == nullptr) return true;
  const Fence& fence = *granule.fence;
  const bool eager_done = std::ranges::all_of(
      fence.eager, [&](const EagerUse& use) { return watch_.Done(use.stream, use.work); });
  if (!eager_done) return false;
  if (!in_scope_ || fence.scope != scope_ || invalid_.contains(fence.capture)) return true;
  // Nothing has been captured that could have used it.
  if (fence.in_over_capture) return false;
  if (fence.capture == kNoCapture && !fence.used_by_others) return true;
  if (fence.in_one_capture && fence.nodes.empty()) return true;
  const CaptureId capture = dag_.At(stream).capture;
  if (fence.home == stream && !fence.used_by_others) return capture == fence.capture;
  return fence.in_one_capture && capture == fence.capture && dag_.RunsBehind(stream, fence.nodes);
}

bool ReuseOracle::Promised(const Granule& granule, StreamId stream) const {
  if (granule.used) return false;
  if (granule.fence == nullptr) return true;
  const Fence& fence = *granule.fence;
  if (fence.scope != scope_) {
    return !fence.behind_mark || (fence.mark && watch_.Passed(*fence.mark));
  }
  const CaptureId capture = dag_.At(stream).capture;
  if (capture == kNoCapture || capture != fence.capture || invalid_.contains(capture)) return false;
  if (fence.home == stream && !fence.used_by_others) {
    return fence.in_sole_capture && dag_.ProvesBehind(stream, fence.nodes);
  }
  return fence.in_one_capture && fence.promised && seen_.size() > 1 &&
         dag_.ProvesBehind(stream, fence.nodes) && dag_.ProvesBehind(stream, fence.late);
}

std::string ReuseOracle::JudgeGrowth(const Block& block) const {
  for (const auto& [number, page] : pages_) {
    uint64_t length = 0;
    for (size_t i = 0; i < page.size(); ++i) {
      length = Promised(page[i], block.stream) ? length + kGranule : 0;
      if (length < block.bytes) continue;
      return Text("the pool grew for a block of ", block.bytes, " bytes on stream ",
                  static_cast<uint64_t>(block.stream), ", which page ", number,
                  " has room for up to granule ", i);
    }
  }
  return {};
}

template <typename Visit>
void ReuseOracle::ForEachGranule(const std::vector<PhysicalPiece>& pieces, const Visit& visit) {
  for (const PhysicalPiece& piece : pieces) {
    const auto number = static_cast<uint32_t>(piece.page);
    Page& page = pages_.try_emplace(number, Page(page_bytes_ / kGranule)).first->second;
    const uint64_t end = (piece.offset_bytes + piece.length_bytes) / kGranule;
    for (uint64_t i = piece.offset_bytes / kGranule; i < end; ++i) visit(page.at(i), number, i);
  }
}

std::string ReuseOracle::Place(const Block& block, const std::vector<PhysicalPiece>& pieces,
                               uint64_t pages) {
  const CaptureId capture = dag_.At(block.stream).capture;
  if (!invalid_.contains(capture)) told_.insert(capture);
  std::string complaint;
  if (pages > page_count_ && block.bytes < page_bytes_) {
    ++growths_judged_;
    complaint = JudgeGrowth(block);
  }
  // Pages are numbered in the order in which they are made.
  for (; page_count_ < pages; ++page_count_) {
    pages_.try_emplace(static_cast<uint32_t>(page_count_), Page(page_bytes_ / kGranule));
  }
  ForEachGranule(pieces, [&](Granule& granule, uint32_t page, uint64_t i) {
    if (complaint.empty() && !Allowed(granule, block.stream)) {
      complaint = Text("stream ", static_cast<uint64_t>(block.stream), " may not take granule ", i,
                       " of page ", page, granule.used ? ", which is in use" : " yet");
      if (!granule.used) {
        complaint += Text(": freed on stream ", static_cast<uint64_t>(granule.fence->home),
                          granule.fence->used_by_others ? " and used by others" : "");
      }
    }
    if (granule.fence != nullptr && granule.fence->scope == scope_) {
      ++reused_granules_;
      if (granule.fence->home != block.stream) ++reused_across_streams_;
    }
    granule = {.used = true, .fence = nullptr};
  });
  return complaint;
}

void ReuseOracle::Free(const Block& block, const std::vector<PhysicalPiece>& pieces,
                       const std::set<StreamId>& uses, const std::map<StreamId, uint64_t>& eager,
                       CaptureId in, bool same_thread) {
  const auto fence = std::make_shared<Fence>();
  const CaptureDag::Point home = dag_.At(block.stream);
  fence->scope = in_scope_ ? scope_ : 0;
  fence->home = block.stream;
  fence->capture = IsTold(home.capture) ? home.capture : kNoCapture;
  fence->in_over_capture = in != kNoCapture && in != home.capture;
  fence->in_one_capture = home.capture != kNoCapture && !fence->in_over_capture;
  fence->nodes = home.nodes;
  for (const StreamId stream : uses) {
    if (stream == block.stream) continue;
    fence->used_by_others = true;
    const CaptureDag::Point point = dag_.At(stream);
    fence->in_one_capture = fence->in_one_capture && point.capture == home.capture;
    fence->nodes.insert(fence->nodes.end(), point.nodes.begin(), point.nodes.end());
    if (point.capture == kNoCapture) fence->eager.push_back({stream, watch_.Submitted(stream)});
  }
  for (const auto& [stream, work] : eager) fence->eager.push_back({stream, work});
  // Not a block of a stream that the scope has not seen yet, nor one that others used while it had
  // seen no other.
  const bool first = seen_.size() == 1 && seen_.contains(block.stream) && !fence->used_by_others;
  fence->in_sole_capture = captures_ == 1 && same_thread && fence->eager.empty();
  fence->promised = fence->in_sole_capture && (seen_.size() > 1 || first);
  const bool captured = fence->in_one_capture && !invalid_.contains(fence->capture);
  fence->behind_mark = !fence->eager.empty() || (in_scope_ && !(captured && same_thread));
  if (fence->behind_mark) unmarked_.push_back(fence);
  if (in_scope_) in_scope_fences_.push_back(fence);
  ForEachGranule(pieces, [&](Granule& granule, uint32_t, uint64_t) {
    granule = {.used = false, .fence = fence};
  });
}

}  // namespace cgp
