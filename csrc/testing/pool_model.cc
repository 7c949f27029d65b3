#include "testing/pool_model.h"

#include <algorithm>
#include <iterator>
#include <sstream>
#include <utility>

namespace cgp {

PoolModel::PoolModel(DriverWatch& watch, const CaptureDag& dag, uint64_t page_bytes)
    : watch_(watch),
      dag_(dag),
      page_bytes_(page_bytes),
      granules_per_page_(page_bytes / kGranuleBytes) {}

const PoolModel::ModelPool* PoolModel::Find(PoolId id) const {
  const auto it = pools_.find(id);
  return it == pools_.end() ? nullptr : &it->second;
}

bool PoolModel::AnyCaptureOpen() const {
  return std::ranges::any_of(
      pools_, [](const auto& entry) { return entry.second.scope == ScopeKind::kCapture; });
}

const PoolModel::LiveBlock* PoolModel::LiveAt(Address start) const {
  const auto it = live_.find(start);
  return it == live_.end() ? nullptr : &it->second;
}

const PoolModel::LiveBlock* PoolModel::Holding(Address address) const {
  const auto after = live_.upper_bound(address);
  if (after == live_.begin()) return nullptr;
  const LiveBlock& last = std::prev(after)->second;
  return address - last.block.address < last.block.bytes ? &last : nullptr;
}

PoolModel::Trimmable PoolModel::TrimmableBytes() const {
  Trimmable sum;
  for (const auto& [id, pool] : pools_) {
    if (!Unused(id)) continue;
    if (IsOver(id)) sum.least += (pool.pages.size() - pool.leases.size()) * page_bytes_;
    for (const auto& [number, page] : pool.pages) {
      const bool lives =
          std::ranges::any_of(page, [](const Granule& one) { return one.label != 0; });
      if (!lives) sum.most += page_bytes_;
    }
  }
  return sum;
}

bool PoolModel::IsCurrent(uint64_t numbering) const {
  return std::ranges::any_of(
      pools_, [&](const auto& entry) { return entry.second.numbering == numbering; });
}

std::vector<PoolId> PoolModel::ids() const {
  std::vector<PoolId> ids;
  for (const auto& [id, pool] : pools_) ids.push_back(id);
  return ids;
}

bool PoolModel::MayTake(const ModelPool& pool, const Granule& granule, StreamId stream) const {
  if (granule.label != 0 || granule.leased) return false;
  if (pool.scope == ScopeKind::kApart && granule.needed) return false;
  if (IsEager(pool) && granule.captured &&
      !std::ranges::all_of(pool.replays, [&](const Pending& replay) {
        return watch_.IsBehind(stream, replay.stream, replay.work);
      })) {
    return false;
  }
  if (granule.fence == nullptr) return true;
  const Fence& fence = *granule.fence;
  const bool done = std::ranges::all_of(fence.pending, [&](const Pending& pending) {
    const bool ordered = IsEager(pool) && watch_.IsBehind(stream, pending.stream, pending.work);
    return ordered || watch_.Done(pending.stream, pending.work);
  });
  if (!done) return false;
  if (!pool.scope || fence.scope != pool.scope_number || dag_.IsInvalid(fence.capture)) {
    return true;
  }
  // Nothing has been captured that could have used it.
  if (fence.in_over_capture) return false;
  if (fence.capture == kNoCapture && !fence.used_by_others) return true;
  if (fence.in_one_capture && fence.nodes.empty()) return true;
  if (dag_.At(stream).capture != fence.capture) return false;
  return (fence.owner == stream && !fence.used_by_others) ||
         (fence.in_one_capture && dag_.RunsBehind(stream, fence.nodes));
}

bool PoolModel::MustOffer(const ModelPool& pool, const Granule& granule, StreamId stream) const {
  if (granule.label != 0 || granule.leased) return false;
  if (granule.fence == nullptr) return true;
  const Fence& fence = *granule.fence;
  if (pool.scope && fence.scope == pool.scope_number) {
    if (dag_.At(stream).capture != fence.capture || !dag_.IsCaptured(stream)) return false;
    if (fence.owner == stream && !fence.used_by_others) {
      return fence.in_sole_capture && dag_.ProvesBehind(stream, fence.nodes);
    }
    const bool leased = fence.used_by_others || !pool.may_refuse.contains({fence.owner, stream});
    return leased && fence.in_one_capture && fence.promised && pool.seen.size() > 1 &&
           dag_.ProvesBehind(stream, fence.nodes) && dag_.ProvesBehind(stream, fence.late);
  }
  const bool own = fence.promised_at_once && fence.owner == stream;
  return (IsEager(pool) && own) || KnownToBeDone(fence);
}

bool PoolModel::KnownToBeDone(const Fence& fence) const {
  if (fence.group != nullptr) return fence.group->mark && watch_.Passed(*fence.group->mark);
  return fence.pending.empty() || (fence.mark && watch_.Passed(*fence.mark));
}

PoolModel::PageRuns PoolModel::Runs(const ModelPool& pool, const std::vector<Granule>& page,
                                    StreamId stream) const {
  PageRuns runs;
  for (uint64_t i = 0; i < page.size(); ++i) {
    runs.tail = MustOffer(pool, page[i], stream) ? runs.tail + 1 : 0;
    if (runs.tail == i + 1) runs.head = runs.tail;
    runs.longest = std::max(runs.longest, runs.tail);
  }
  return runs;
}

PoolModel::Need PoolModel::NeedOf(PoolId id, uint64_t bytes, StreamId stream,
                                  const std::vector<PhysicalPiece>& kept) const {
  const ModelPool& pool = pools_.at(id);
  const uint64_t granules = Granules::FromBytesRoundedUp(bytes).count();
  uint64_t whole_pages = 0;
  std::vector<PageRuns> parts;  // of the pages in part use
  auto pages = pool.pages;
  for (const PhysicalPiece& piece : kept) {
    const uint64_t first =
        Index(piece.page) * granules_per_page_ + piece.offset_bytes / kGranuleBytes;
    for (uint64_t i = first; i < first + piece.length_bytes / kGranuleBytes; ++i) {
      const auto page = pages.find(static_cast<uint32_t>(i / granules_per_page_));
      if (page != pages.end()) page->second[i % granules_per_page_].label = ~uint64_t{0};
    }
  }
  for (const auto& [number, page] : pages) {
    const PageRuns runs = Runs(pool, page, stream);
    if (runs.longest == granules_per_page_) {
      ++whole_pages;
    } else if (runs.longest > 0) {
      parts.push_back(runs);
    }
  }
  // What the best tail, the best head, or a tail and a head of two pages can hold of the remainder.
  // A block below a page lies in one page: it is not worth a range of its own.
  const bool small = granules < granules_per_page_;
  uint64_t held = 0;
  for (const PageRuns& part : parts) {
    held = std::max(held, small ? part.longest : std::max(part.head, part.tail));
    for (const PageRuns& other : parts) {
      if (!small && &other != &part) held = std::max(held, part.tail + other.head);
    }
  }
  const uint64_t remainder = granules % granules_per_page_;
  const uint64_t beyond = PagesBeyond(pool, bytes, stream);
  return {.ideal = granules / granules_per_page_ + (remainder > held ? 1 : 0),
          .whole_pages = whole_pages,
          .apart = MayComeAgain(pool),
          .beyond = beyond - std::min(beyond, whole_pages)};
}

std::pair<StreamId, CaptureId> PoolModel::InCapture(StreamId stream) const {
  return {stream, dag_.IsCaptured(stream) ? dag_.At(stream).capture : kNoCapture};
}

// Where several streams make a large pool grow in a capture, it may grow to have a 128th of its
// pages whole besides: not for blocks below a page, nor for a page more. A stream that is in
// another capture than before counts as another.
uint64_t PoolModel::PagesBeyond(const ModelPool& pool, uint64_t bytes, StreamId stream) const {
  const bool several =
      pool.used_by_others || pool.asked.size() > (pool.asked.contains(InCapture(stream)) ? 1 : 0);
  if (pool.scope != ScopeKind::kCapture || !several) return 0;
  const uint64_t pages = pool.pages.size() / 128;
  return pages > 1 && bytes > page_bytes_ - kGranuleBytes ? pages : 0;
}

uint64_t PoolModel::WholePagesOf(PoolId id, const std::vector<PhysicalPiece>& pieces,
                                 StreamId stream) const {
  const ModelPool& pool = pools_.at(id);
  return static_cast<uint64_t>(std::ranges::count_if(pieces, [&](const PhysicalPiece& piece) {
    const auto page = pool.pages.find(Index(piece.page));
    return page == pool.pages.end() ||
           Runs(pool, page->second, stream).longest == granules_per_page_;
  }));
}

bool PoolModel::IsUntouched(const ModelPool& pool, PageId page) const {
  const auto found = pool.pages.find(Index(page));
  return found != pool.pages.end() &&
         std::ranges::all_of(found->second, [&](const Granule& granule) {
           const Fence* const fence = granule.fence.get();
           const bool open = !fence || fence->scope != pool.scope_number || fence->nodes.empty();
           return granule.label == 0 && open;
         });
}

PoolModel::ModelPool& PoolModel::FindOrCreate(PoolId id) {
  const auto [it, made] = pools_.try_emplace(id);
  if (made) {
    it->second.incarnation = it->second.numbering = next_incarnation_++;
    it->second.stats.page_bytes = page_bytes_;
  }
  return it->second;
}

void PoolModel::BeginScope(PoolId id, ScopeKind kind, bool may_mark) {
  ModelPool& pool = FindOrCreate(id);
  if (!IsLoan(id)) ++pool.users;
  if (kind == ScopeKind::kCapture) pool.may_name = false;
  pool.scope = kind;
  pool.stats.scope_peak_bytes = pool.stats.allocated_bytes;
  pool.scope_number = next_scope_++;
  pool.asked.clear();
  pool.used_by_others = false;
  pool.captures = 0;
  pool.told.clear();
  pool.seen.clear();
  pool.may_refuse.clear();
  pool.in_scope.clear();
  if (may_mark) Mark(pool);
  pool.replays_unknown = IsEager(pool) && pool.captured_pages > 0 && !may_mark;
  const auto had = [&](uint32_t page) { return page < pool.captured_pages; };
  if (pool.replays_unknown) Hold(pool, had);
  if (kind == ScopeKind::kApart) {
    const auto graphs = NeedsOf(id, {}, /*more=*/false);
    for (auto& [number, page] : pool.pages) {
      const bool needed = std::ranges::count(graphs, number, kValue) > 0;
      for (Granule& granule : page) granule.needed = needed;
    }
    const auto all = NeedsOf(id, {}, /*more=*/true);
    const auto is_needed = [&](uint32_t page) { return std::ranges::count(all, page, kValue) > 0; };
    if (!pool.replays_unknown && pool.captured_pages > 0) Hold(pool, is_needed);
  }
  pool.touched.clear();
  for (const auto& [address, live] : live_) {
    if (live.pool == id) Touch(pool.touched, live);
  }
}

void PoolModel::EndScope(PoolId id, bool may_mark) {
  ModelPool& pool = Known(id);
  if (may_mark && IsEager(pool)) Mark(pool);
  pool.withdrawn = false;
  pool.had_scopes = true;
  if (pool.scope == ScopeKind::kCapture) {
    pool.captured_pages = pool.pages.size();
    pool.graphs.push_back({.pages = std::move(pool.touched), .left = {}});
    for (const auto& [address, live] : live_) {
      if (live.pool == id) Touch(pool.graphs.back().left, live);
    }
    pool.may_name = true;
    Recount(pool);
  }
  pool.scope.reset();
  DropIfGone(id);
}

void PoolModel::BeginCapture(PoolId id, CaptureId capture) {
  if (++Known(id).captures == 1) Known(id).told.insert(capture);
}

void PoolModel::See(PoolId id, StreamId stream) {
  ModelPool& pool = Known(id);
  if (!pool.seen.insert(stream).second || pool.seen.size() != 2) return;
  for (const auto& fence : pool.in_scope) {
    fence->promised = fence->promised && pool.seen.contains(fence->owner) && fence->owner != stream;
    fence->late = dag_.At(fence->owner).nodes;
  }
}

void PoolModel::Replay(PoolId id, StreamId stream) {
  Known(id).replays.push_back({stream, watch_.Submitted(stream)});
}

void PoolModel::Mark(ModelPool& pool) const {
  for (const std::shared_ptr<Fence>& fence : pool.unmarked) fence->mark = watch_.TakeMark();
  pool.unmarked.clear();
  pool.held.reset();
}

// Nothing that is free of pages that graphs may use is promised to anyone before the device has been
// marked, nor what lives there when it is freed.
void PoolModel::Hold(ModelPool& pool, const std::function<bool(uint32_t)>& had) {
  for (auto& [address, block] : live_) {
    if (&Known(block.pool) != &pool) continue;
    if (std::ranges::any_of(block.pieces, had, [](const auto& piece) { return Index(piece.page); }))
      block.suspects.insert(block.block.stream);
  }
  for (auto& [number, page] : pool.pages) {
    if (!had(number)) continue;
    for (Granule& granule : page) {
      if (granule.label != 0 || granule.leased) continue;
      auto held = std::make_shared<Fence>();
      if (granule.fence != nullptr) held->pending = granule.fence->pending;
      Hold(pool, *held);
      granule.fence = std::move(held);
    }
  }
}

void PoolModel::Release(PoolId id) {
  if (--Known(id).users == 0) {
    for (Capture& one : Known(id).graphs) one.gone = true;
  }
  DropIfGone(id);
}

void PoolModel::DropIfGone(PoolId id) {
  if (IsOver(id) && Known(id).pages.empty()) pools_.erase(id);
}

void PoolModel::Trim() {
  for (const PoolId id : ids()) {
    if (IsOver(id)) pools_.erase(id);
  }
}

std::string PoolModel::Shrink(PoolId id, uint64_t pages, const PiecesOf& pieces_of) {
  ModelPool& pool = Known(id);
  pool.incarnation = pool.numbering = next_incarnation_++;
  const auto is_own = [&](const auto& entry) { return entry.second.pool == id; };
  if (std::ranges::none_of(live_, is_own)) pool.captured_pages = 0;
  pool.unmarked.clear();
  pool.held.reset();
  pool.stream_fences.clear();
  pool.replays.clear();
  pool.graphs.clear();
  pool.asleep = false;  // nothing is away
  pool.kept.clear();
  pool.may_name = false;
  pool.first_page.clear();
  pool.pages.clear();
  for (uint32_t number = 0; number < pages; ++number) pool.pages[number].resize(granules_per_page_);
  Recount(pool);
  for (auto& [address, block] : live_) {
    if (block.pool != id) continue;
    block.pieces = pieces_of(address);
    std::string complaint = Occupy(pool, block, /*fenced=*/false);
    if (!complaint.empty()) return complaint;
  }
  return {};
}

void PoolModel::Ask(PoolId id, StreamId stream) {
  ModelPool& pool = Known(id);
  pool.asked.insert(InCapture(stream));
  See(id, stream);
  if (IsEager(pool)) GoOn(pool, stream);
}

std::string PoolModel::Describe(const Fence& fence) const {
  std::ostringstream text;
  text << "freed on stream " << static_cast<uint64_t>(fence.owner);
  if (fence.scope != 0) text << " in capture scope " << fence.scope;
  if (fence.used_by_others) text << " and used by others";
  for (const Pending& pending : fence.pending) {
    text << " stream " << static_cast<uint64_t>(pending.stream) << " work " << pending.work
         << (watch_.Done(pending.stream, pending.work) ? " (done)" : " (pending)");
  }
  return text.str();
}

// What is wrong with the shape of the block or with its addresses.
std::string PoolModel::Misshapen(const LiveBlock& block) const {
  const auto& [address, bytes] = std::pair(block.block.address, block.block.bytes);
  if (address % kGranuleBytes != 0 || address + bytes < address) return "a misaligned block";
  const auto next = live_.upper_bound(address);
  const LiveBlock* const holder = Holding(address);
  if ((holder != nullptr && holder->block.address != address) ||
      (next != live_.end() && next->first < address + bytes)) {
    return "a block on addresses of another one";
  }
  uint64_t sum = 0;
  for (const PhysicalPiece& piece : block.pieces) {
    const auto [offset, length] = std::pair(piece.offset_bytes, piece.length_bytes);
    if (length == 0 || (offset | length) % kGranuleBytes != 0) return "a misshapen piece";
    if (offset > page_bytes_ || length > page_bytes_ - offset)
      return "a piece ends behind its page";
    sum += length;
  }
  return sum == bytes ? "" : "pieces that are not as long as their block";
}

template <typename Visit>
void PoolModel::ForEachGranule(ModelPool& pool, const LiveBlock& block, const Visit& visit) const {
  for (const PhysicalPiece& piece : block.pieces) {
    std::vector<Granule>& page = pool.pages[Index(piece.page)];
    page.resize(granules_per_page_);
    const uint64_t end = (piece.offset_bytes + piece.length_bytes) / kGranuleBytes;
    for (uint64_t i = piece.offset_bytes / kGranuleBytes; i < end; ++i) visit(page[i]);
  }
}

std::string PoolModel::Occupy(ModelPool& pool, const LiveBlock& block, bool fenced) {
  std::string complaint = Misshapen(block);
  if (!complaint.empty()) return complaint;
  ForEachGranule(pool, block, [&](Granule& granule) {
    if (granule.label != 0) {
      complaint = "bytes that are held by block b" + std::to_string(granule.label);
    } else if (fenced && !MayTake(pool, granule, block.block.stream)) {
      complaint = "bytes that may not be taken yet: " +
                  (granule.fence == nullptr ? "a replay may use them" : Describe(*granule.fence));
    }
    if (fenced && granule.fence != nullptr && granule.fence->scope == pool.scope_number) {
      ++reused_granules_;
      if (granule.fence->owner != block.block.stream) ++reused_across_streams_;
    }
    const bool captured = granule.captured || !block.eager;
    granule = {block.label, nullptr, captured, granule.leased, false, granule.blocks + 1};
  });
  return complaint;
}

void PoolModel::Count(ModelPool& pool, const Block& block) {
  pool.stats.allocated_bytes += block.bytes;
  pool.stats.peak_allocated_bytes =
      std::max(pool.stats.peak_allocated_bytes, pool.stats.allocated_bytes);
  pool.stats.requested_bytes += block.requested_bytes;
  ++pool.stats.live_blocks;
  ++pool.stats.allocations;
}

std::string PoolModel::Place(uint64_t label, PoolId id, const Block& block,
                             std::vector<PhysicalPiece> pieces, uint64_t pages) {
  ModelPool& pool = Known(id);
  // A plan may have a block lie in fewer of the pages that it needs than are made.
  const bool may_be_ahead =
      MayComeAgain(pool) || PagesBeyond(pool, block.requested_bytes, block.stream) > 0;
  LiveBlock live{label, id, block, std::move(pieces)};
  live.eager = IsEager(pool);
  if (dag_.IsCaptured(block.stream)) pool.told.insert(dag_.At(block.stream).capture);
  const auto is_untouched = [&](const PhysicalPiece& piece) {
    return IsUntouched(pool, piece.page);
  };
  if (pages > pool.pages.size() || std::ranges::any_of(live.pieces, is_untouched)) {
    for (const StreamId other : pool.seen) pool.may_refuse.emplace(block.stream, other);
  }
  std::string complaint = Occupy(pool, live, /*fenced=*/true);
  for (uint32_t number = 0; may_be_ahead && number < pages; ++number) {
    pool.pages[number].resize(granules_per_page_);
  }
  if (pool.pages.size() != pages && complaint.empty()) {
    complaint = "has " + std::to_string(pages) + " pages, of which " +
                std::to_string(pool.pages.size()) + " are accounted for";
  }
  Recount(pool);
  if (pool.scope == ScopeKind::kCapture) Touch(pool.touched, live);
  Count(pool, block);
  pool.stats.scope_peak_bytes = std::max(pool.stats.scope_peak_bytes, pool.stats.allocated_bytes);
  if (!live_.emplace(block.address, std::move(live)).second && complaint.empty()) {
    complaint = "a live block starts at the same address";
  }
  return complaint;
}

// A stream goes on in an eager scope: what it freed in earlier ones is its own again, and may be
// kept from others until this scope has ended too.
void PoolModel::GoOn(ModelPool& pool, StreamId stream) const {
  std::vector<std::shared_ptr<Fence>>& fences = pool.stream_fences[stream];
  std::erase_if(fences, [](const std::shared_ptr<Fence>& fence) { return fence.use_count() == 1; });
  for (const std::shared_ptr<Fence>& fence : fences) {
    fence->mark.reset();
    pool.unmarked.push_back(fence);
  }
}

std::shared_ptr<PoolModel::Fence> PoolModel::FenceOf(const ModelPool& pool,
                                                     const LiveBlock& block) const {
  auto fence = std::make_shared<Fence>();
  fence->owner = block.block.stream;
  const bool in_capture = pool.scope == ScopeKind::kCapture;
  fence->used_by_others = !block.uses.empty();
  // Outside of scopes too while a capture is under way, which may have used it, and which a scope
  // may join.
  const bool eager = block.eager || (!in_capture && (pool.scope || !watch_.MayQuiesce()));
  fence->promised_at_once = block.uses.empty() && (in_capture ? !block.eager : eager) &&
                            block.suspects.empty() &&
                            (block.eager || in_capture || !pool.replays_unknown);
  fence->pending = block.inherited;
  if (!block.suspects.empty()) fence->pending.push_back({block.block.stream, 0});
  // The capture's end stands for all that the capture did with the block; not for eager work before
  // it.
  if (eager || (!in_capture && !block.uses.empty())) {
    std::set<StreamId> streams = block.uses;
    streams.insert(block.block.stream);
    for (const StreamId stream : streams) {
      fence->pending.push_back({stream, watch_.Submitted(stream)});
    }
  }
  return in_capture || !fence->pending.empty() ? fence : nullptr;
}

bool PoolModel::AddCaptured(const ModelPool& pool, const LiveBlock& block, CaptureId in,
                            bool same_thread, Fence& fence) const {
  const CaptureDag::Point home = dag_.At(fence.owner);
  fence.scope = pool.scope_number;
  if (pool.told.contains(home.capture)) fence.capture = home.capture;
  fence.in_over_capture = in != kNoCapture && in != home.capture;
  fence.in_one_capture = home.capture != kNoCapture && !fence.in_over_capture;
  fence.nodes = home.nodes;
  for (const StreamId stream : block.uses) {
    const CaptureDag::Point point = dag_.At(stream);
    fence.in_one_capture = fence.in_one_capture && point.capture == home.capture;
    fence.nodes.insert(fence.nodes.end(), point.nodes.begin(), point.nodes.end());
  }
  fence.in_sole_capture = pool.captures == 1 && same_thread && fence.pending.empty();
  // Not a block of a stream that the scope has not seen yet, nor one that others used while it had
  // seen no other.
  const bool first =
      pool.seen.size() == 1 && pool.seen.contains(fence.owner) && !fence.used_by_others;
  fence.promised = fence.in_sole_capture && (pool.seen.size() > 1 || first);
  return fence.in_one_capture && !dag_.IsInvalid(fence.capture) && same_thread;
}

void PoolModel::Hold(ModelPool& pool, Fence& fence) {
  if (pool.held == nullptr) {
    pool.held = std::make_shared<Fence>();
    pool.unmarked.push_back(pool.held);
  }
  fence.group = pool.held;
}

void PoolModel::Free(Address start, CaptureId in, bool same_thread) {
  const auto it = live_.find(start);
  const LiveBlock block = std::move(it->second);
  live_.erase(it);
  ModelPool& pool = Known(block.pool);
  for (auto& [number, lease] : pool.block_leases) lease.second.erase(block.label);
  const std::shared_ptr<Fence> fence = FenceOf(pool, block);
  bool scope_tells = true;
  if (pool.scope == ScopeKind::kCapture) {
    scope_tells = AddCaptured(pool, block, in, same_thread, *fence);
    pool.in_scope.push_back(fence);
  }
  if (fence != nullptr && (!fence->pending.empty() || !scope_tells)) {
    // What a restore brought back is held, or its stream's own again where the pool has seen the
    // end of what was under way: it is promised once both would be open.
    if (fence->pending.empty() || (!fence->promised_at_once && block.suspects.empty())) {
      Hold(pool, *fence);
    } else {
      std::vector<std::shared_ptr<Fence>>& own = pool.stream_fences[block.block.stream];
      own.push_back(fence);
      GoOn(pool, block.block.stream);
    }
  }
  ForEachGranule(pool, block, [&](Granule& granule) {
    granule.label = 0;
    granule.fence = granule.leased ? nullptr : fence;
  });
  pool.stats.allocated_bytes -= block.block.bytes;
  pool.stats.requested_bytes -= block.block.requested_bytes;
  --pool.stats.live_blocks;
  ++pool.stats.frees;
}

void PoolModel::RecordUse(Address start, StreamId stream) {
  LiveBlock& block = live_.at(start);
  if (stream == block.block.stream) return;
  block.uses.insert(stream);
  Known(block.pool).used_by_others = true;
  block.eager |= Known(block.pool).scope != ScopeKind::kCapture || !dag_.IsCaptured(stream);
}

// What is still under way on the bytes goes on, and must be over before they go to another block.
std::string PoolModel::Revive(ModelPool& pool, const std::set<const Fence*>& fresh,
                              LiveBlock block) {
  block.inherited.clear();
  std::set<const Fence*> seen;
  ForEachGranule(pool, block, [&](const Granule& granule) {
    const Fence* const fence = granule.fence.get();
    if (fence == nullptr || !seen.insert(fence).second) return;
    if (!fresh.contains(fence) && KnownToBeDone(*fence)) return;
    if (!fence->pending.empty() || fence->group != nullptr) {
      block.suspects.insert(block.block.stream);
    }
    for (const Pending& pending : fence->pending) {
      if (!watch_.Done(pending.stream, pending.work)) block.inherited.push_back(pending);
    }
  });
  std::string complaint = Occupy(pool, block, /*fenced=*/false);
  Count(pool, block.block);
  const Address start = block.block.address;
  live_.emplace(start, std::move(block));
  return complaint;
}

}  // namespace cgp
