#include "core/memory/stream_memory.h"

#include <array>
#include <utility>

#include "core/base/error.h"

namespace cgp {

void StreamMemory::BeginScope(ScopeKind kind, bool may_ask_device, const IndexSet& needed) {
  CGP_CHECK(!scope_);
  may_ask_device = may_ask_device && driver_.MayQuiesce();
  if (kind == ScopeKind::kLoan && !may_ask_device) {
    throw UsageError(
        "cudagraph_pool: nothing can be lent now: it has to come behind all work of the device, "
        "and to mark that would break a capture under way. End the capture first.");
  }
  const bool has_graphs = captured_end_ > PageId{0};
  const bool behind_replays =
      kind == ScopeKind::kLoan || (kind != ScopeKind::kCapture && has_graphs);
  std::shared_ptr<SharedEvent> mark;
  if (may_ask_device && (behind_replays || fences_.NeedsMark())) mark = fences_.Mark();
  Poll();
  // Makes room now, so that a scope ends without an error even if nothing was done in it, or its
  // first block got no memory. This precedes what is held: if it throws, nothing is.
  bytes_.ReserveOpening(fences_.limit() + 2);
  if (behind_replays && !mark) {
    IndexSet captured;
    captured.Resize(bytes_.space().page_count());
    captured.SetRange(0, std::min(Index(captured_end_), bytes_.space().page_count()), true);
    HoldFromEager(captured);
  } else if (kind == ScopeKind::kApart && has_graphs) {
    HoldFromEager(needed);
  }
  if (behind_replays) replays_ = std::move(mark);
  scope_ = kind;
  thread_ = std::this_thread::get_id();
}

void StreamMemory::EndScope(bool may_ask_device) {
  CGP_CHECK(scope_);
  const bool captured = *scope_ == ScopeKind::kCapture;
  GiveFreedAtEnd();
  ReserveOpening();
  // Marked now, the end of this work is known sooner than if the next scope marks it.
  if (!captured && fences_.NeedsMark() && may_ask_device && driver_.MayQuiesce()) fences_.Mark();
  // Nothing throws from here on.
  if (captured && bytes_.stream_count() > 0) bytes_.DropSpareFreeLists();
  OpenFences(fences_.EndScope());
  bytes_.Open(std::array{FenceId::kRingLater}, FenceId::kRing);
  later_in_ring_ = FenceId::kOpen;
  bytes_.RemoveStreams();
  tenures_.clear();
  if (captured) {
    DropProofs();
    captured_end_ = PageId{bytes_.space().page_count()};
  }
  replays_.reset();
  scope_.reset();
}

FreeList& StreamMemory::BeginTake(LiveBlock& live, std::optional<CaptureId> in) {
  GiveFreed();
  const std::size_t list = FreeListFor(live.block.stream, in);
  live.tenure = tenures_[list];
  bytes_.ReserveTake();
  return bytes_.free_list(list);
}

// The number of the free list of a stream that has allocated in the open scope, and in capture `in`
// of several.
std::optional<std::size_t> StreamMemory::FindFreeList(StreamId stream,
                                                      std::optional<CaptureId> in) const {
  for (std::size_t i = 0; i < bytes_.stream_count(); ++i) {
    if (bytes_.free_list(i).stream() == stream && (!in || proofs_.capture(i) == *in)) return i;
  }
  return std::nullopt;
}

std::size_t StreamMemory::FreeListFor(StreamId stream, std::optional<CaptureId> in) {
  if (*scope_ == ScopeKind::kCapture) {
    if (several_streams_) return ProvenFreeList(stream);
    if (bytes_.stream_count() == 0) {
      sole_capture_ = in;
      return AddFreeList(stream);
    }
    if (bytes_.free_list(0).stream() == stream && in == sole_capture_) return 0;
    ExpectSeveralStreams();
    return ProvenFreeList(stream);
  }
  const std::optional<std::size_t> list = FindFreeList(stream);
  return list ? *list : AddFreeList(stream);
}

// Adds a free list for a stream that has none in this scope, or none in its capture. Throws with
// nothing changed.
std::size_t StreamMemory::AddFreeList(StreamId stream) {
  if (replays_) WaitForReplays(stream);
  const FenceId own = fences_.ForStream(stream, *scope_ != ScopeKind::kCapture);
  ReserveMore(tenures_, 1);
  bytes_.AddFreeList(stream, own);
  fences_.Renew(own);  // it stays the stream's until the scope ends
  tenures_.push_back(++last_tenure_);
  return tenures_.size() - 1;
}

// The number of the stream that allocated the block, if that was in the open scope.
std::optional<std::size_t> StreamMemory::FindTenure(const LiveBlock& live) const {
  const auto found = std::ranges::find(tenures_, live.tenure);
  if (found == tenures_.end()) return std::nullopt;
  return static_cast<std::size_t>(found - tenures_.begin());
}

// pre: the stream is about to work, so it is not destroyed.
void StreamMemory::WaitForReplays(StreamId stream) {
  driver_.Capture(stream, &frontier_);
  if (frontier_.held) {
    throw UsageError(
        "cudagraph_pool: eager work allocates on a stream that is capturing a graph. End the "
        "capture first, or allocate on another stream.");
  }
  driver_.WaitEvent(stream, replays_->get());
}

// Holds, until the device is marked, what is free of these pages now, and what live blocks will
// leave: a graph may use the bytes of either. Pages that eager work made since the last capture are
// not among them, or each such scope would make more. Throws with nothing changed.
void StreamMemory::HoldFromEager(const IndexSet& pages) {
  const FenceId held = fences_.Held(/*eager=*/true);
  bytes_.ReserveFence(held);
  bytes_.ReserveTake();
  std::vector<Others*> captured;
  blocks_.ForEach([&](Address, LiveBlock& live) {
    bool is_captured = false;
    bytes_.ForEachPiece(live.site, live.length(), [&](PageId page, Granules, Granules) {
      is_captured |= pages.Contains(Index(page));
    });
    if (!is_captured) return;
    ReserveMore(live.GetOthers().behind, 1);
    captured.push_back(&live.GetOthers());
  });
  bytes_.Hold(pages, held);  // nothing throws from here on
  some_are_behind_ = true;
  for (Others* const others : captured) others->AddBehind(held);
}

bool StreamMemory::Poll() {
  if (fences_.empty()) return false;
  ReserveOpening();
  return OpenFences(fences_.Poll());
}

void StreamMemory::OpenIdle() {
  ReserveOpening();
  OpenFences(fences_.OpenAll());
}

void StreamMemory::OpenAll() {
  OpenFences(fences_.OpenAll());
  // The output of a graph may outlive it, with work still going on.
  if (blocks_.size() == 0) captured_end_ = PageId{0};
  several_streams_ = false;
}

// The fence of the ring's bytes that would otherwise be behind `fence`.
FenceId StreamMemory::InRing(FenceId fence) {
  if (fence == FenceId::kOpen) return FenceId::kRing;
  const bool is_known = later_in_ring_ == FenceId::kOpen || later_in_ring_ == fence;
  if (!is_known || !fences_.OpensAtEnd(fence)) return fence;
  later_in_ring_ = fence;
  return FenceId::kRingLater;
}

void StreamMemory::DissolveRing() {
  ReserveOpening();
  bytes_.ReserveFence(later_in_ring_);
  bytes_.Open(std::array{FenceId::kRing});
  bytes_.Open(std::array{FenceId::kRingLater}, later_in_ring_);
}

// Gives everyone what is behind these fences, also of live blocks. Returns whether there are any.
// pre: ReserveOpening().
bool StreamMemory::OpenFences(FenceTable::Opened opened) {
  if (opened.empty()) return false;
  if (std::exchange(some_are_behind_, false)) {
    blocks_.ForEach([&](Address, LiveBlock& live) {
      if (!live.others) return;
      std::erase_if(live.others->behind,
                    [&](FenceId fence) { return std::ranges::binary_search(opened, fence); });
      some_are_behind_ |= live.is_behind();
    });
  }
  bytes_.Open(opened);
  return true;
}

// The fence of a block that is freed now, by where it is freed and who has worked on it (design.md,
// section 5). nullopt: the next allocation in this capture has to ask again.
//
//   outside a capture   its stream, in graphs whose captures are over   open
//                       its stream                                      its fence, until a mark
//                       several streams                                 a held fence, until a mark
//   in a capture        its stream, the only one of the scope           its fence, until the end
//                       streams that the same graph captures            a proof fence
//                       streams of several graphs                       a held fence, until the end
//                       what no graph captures                          a held fence, until a mark
std::optional<FenceId> StreamMemory::ChooseFence(const LiveBlock& live, bool may_ask) {
  const StreamId stream = live.block.stream;
  const bool is_alone = live.is_alone();
  // A fence that outlives scopes does not wait for captured work.
  const bool is_captured = !live.eager && !live.is_behind();
  if (scope_ != ScopeKind::kCapture) {
    if (!is_alone) return fences_.Held(/*eager=*/true);
    // Not if a capture under way may use it: a scope of this pool may yet begin in that.
    const bool is_over = !scope_ && is_captured && driver_.MayQuiesce();
    return is_over ? FenceId::kOpen : fences_.ForStream(stream, /*eager=*/true);
  }
  if (!may_ask) {
    if (is_captured && StaysInCapture(live)) return std::nullopt;
    return fences_.Held(/*eager=*/true);
  }
  // The capture's end says nothing of work outside of it.
  if (!is_captured) return fences_.Held(/*eager=*/true);
  if (is_alone && !several_streams_) return fences_.ForStream(stream, /*eager=*/false);
  const CaptureId of = CollectFrontiers(live);
  if (of == kNoCapture) {
    // A stream that captures nothing may have worked on it in a body that is over, except where
    // nobody captures anything.
    const bool nobody_captures = capture_ == kNoCapture && !several_captures_;
    if (is_alone && nobody_captures) return fences_.ForStream(stream, /*eager=*/false);
    return fences_.Held(/*eager=*/true);
  }
  if (!several_streams_) return fences_.Held(/*eager=*/false);
  NoteCapture(of);
  std::optional<std::size_t> owner;
  if (is_alone) owner = FindTenure(live);
  if (owner && proofs_.capture(*owner) != of) owner.reset();
  // Of several graphs, a stream may have left the one in which it used the block.
  if (several_captures_ && !owner) return fences_.Held(/*eager=*/false);
  return ProofFence(of, owner);
}

// Whether the block's streams are known, without asking, to stay in the capture until it ends. Then
// it does not matter when they are asked where they stand.
bool StreamMemory::StaysInCapture(const LiveBlock& live) const {
  const auto is_known = [&](StreamId stream) { return IsKnownToCapture(stream); };
  if (live.is_alone() && !several_streams_) return true;
  return is_known(live.block.stream) &&
         (live.is_alone() || std::ranges::all_of(live.others->uses, is_known));
}

FenceId StreamMemory::FenceFor(const LiveBlock& live) {
  const std::optional<FenceId> fence = ChooseFence(live, /*may_ask=*/true);
  CGP_CHECK(fence);
  bytes_.ReserveFence(*fence);
  return *fence;
}

// Whether the stream is known, without asking, to be part of the capture: from the only capture of
// a scope no stream gets away before its end.
bool StreamMemory::IsKnownToCapture(StreamId stream) const {
  return capture_ != kNoCapture && !several_captures_ && FindFreeList(stream, capture_);
}

// The capture that the stream's work now belongs to; kNoCapture if there is none or it is unknown.
// A stream that is not part of the capture may join it later.
CaptureId StreamMemory::CaptureOfUse(StreamId stream) {
  if (scope_ != ScopeKind::kCapture) return kNoCapture;
  if (IsKnownToCapture(stream)) return capture_;
  if (InOthersCapture()) return kNoCapture;  // and must not be asked
  driver_.Capture(stream, &frontier_);
  return frontier_.capture;
}

void StreamMemory::Free(LiveBlock& live, bool of_ring) {
  if (const std::optional<FenceId> fence = ChooseFence(live, !InOthersCapture())) {
    Give(live, of_ring ? InRing(*fence) : *fence);
  } else {
    ReserveMore(freed_, 1);
    freed_.push_back(std::move(live));
  }
}

void StreamMemory::RecordUse(LiveBlock& live, StreamId stream) {
  if (stream == live.block.stream) return;
  // The driver learns of the device so, and marks it too.
  if (DeviceOf(stream)) driver_.Capture(stream, &frontier_);
  const CaptureId capture = CaptureOfUse(stream);
  if (InOthersCapture()) {
    expects_several_streams_ = true;
  } else if (scope_ == ScopeKind::kCapture) {
    ExpectSeveralStreams();
    NoteCapture(capture);  // the stream may be part of another one when the block is freed
  }
  live.AddUse(stream);
  // Else a capture that frees the block would let its end stand for the end of this use too.
  if (capture == kNoCapture) live.eager = true;
}

void StreamMemory::ReserveRevive(LiveBlock& live) const {
  if (!fences_.empty()) live.GetOthers().behind.reserve(fences_.limit());
}

void StreamMemory::Revive(LiveBlock& live) {
  const PageSpace& space = bytes_.space();
  bytes_.ForEachPiece(live.site, live.length(), [&](PageId page, Granules offset, Granules length) {
    for (NodeId id = space.NodeAt(page, offset); id != NodeId::kNone; id = space.node(id).next) {
      const PageSpace::Node& node = space.node(id);
      if (Granules(node.offset) >= offset + length) break;
      CGP_CHECK(!node.used());
      if (node.fence != FenceId::kOpen) live.others->AddBehind(node.fence);
    }
  });
  if (live.others && live.others->empty()) live.others.reset();
  some_are_behind_ |= live.is_behind();
  bytes_.Take(live.site, live.length());
}

// Frees what other threads have freed since the last allocation, behind its fences. pre: an open
// capture is about to allocate. If it throws, the rest is still to be freed.
void StreamMemory::GiveFreed() {
  if (expects_several_streams_) ExpectSeveralStreams();
  expects_several_streams_ = false;
  for (; !freed_.empty(); freed_.pop_back()) Give(freed_.back(), FenceFor(freed_.back()));
}

// The same at the capture's end, which stands for all its work on these blocks. But a stream whose
// use another thread recorded may have worked on afterwards: the device has to be marked then.
void StreamMemory::GiveFreedAtEnd() {
  expects_several_streams_ = false;
  for (; !freed_.empty(); freed_.pop_back()) {
    Give(freed_.back(), fences_.Held(/*eager=*/freed_.back().others != nullptr));
  }
}

void StreamMemory::Check() const {
  bytes_.Check();
  CGP_CHECK(scope_ || bytes_.stream_count() == 0);
  CGP_CHECK(scope_ == ScopeKind::kCapture || (freed_.empty() && !expects_several_streams_));
  CheckProofs();

  // The used nodes are exactly those of live blocks, and of freed ones that wait to be given.
  const PageSpace& space = bytes_.space();
  uint64_t nodes = 0;
  Granules used;
  std::vector<uint32_t> large_pieces(space.page_count());
  const auto check = [&](const LiveBlock& live) {
    Granules of_block;
    bytes_.ForEachNode(live.site, live.length(), [&](NodeId id) {
      CGP_CHECK(space.node(id).used());
      of_block += Granules(space.node(id).length);
      ++nodes;
    });
    CGP_CHECK(of_block == live.length());
    bytes_.ForEachPiece(
        live.site, live.length(), [&](PageId page, Granules offset, Granules length) {
          const NodeId id = space.NodeAt(page, offset);
          const PageSpace::Node& node = space.node(id);
          CGP_CHECK(node.used() && node.offset == offset.count());
          CGP_CHECK(space.IsOfWholePages(id) ? length == bytes_.page_size()
                                             : node.length == length.count());
          const bool is_part = length < bytes_.page_size() && live.length() >= bytes_.page_size();
          large_pieces[Index(page)] += is_part ? 1 : 0;
        });
    used += of_block;
  };
  std::ranges::for_each(freed_, check);
  blocks_.ForEach([&](Address, const LiveBlock& live) { check(live); });
  uint64_t used_nodes = 0;
  space.ForEachNode([&](NodeId id) { used_nodes += space.node(id).used() ? 1 : 0; });
  CGP_CHECK(nodes == used_nodes);
  CGP_CHECK(used + space.free() == space.page_size() * space.page_count());
  for (uint32_t p = 0; p < space.page_count(); ++p) {
    const bool in_pieces = !space.IsOfWholePages(space.first(PageId{p}));
    CGP_CHECK(large_pieces[p] == (in_pieces ? space.large_pieces(PageId{p}) : 0));
  }
}

}  // namespace cgp
