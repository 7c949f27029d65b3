// Who may take which bytes, and that all views know.
#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/pool_state.h"
#include "core/reserve.h"

namespace cgp {

// The view of a stream that has allocated in the open scope, else nullptr.
FreeView* Pool::State::FindView(StreamId stream) const {
  for (const auto& view : views) {
    if (view->stream() == stream && view->own_fence() != FenceId::kOpen) return view.get();
  }
  return nullptr;
}

FreeView& Pool::State::ViewFor(StreamId stream, std::optional<CaptureId> in) {
  if (*scope == ScopeKind::kEager) {
    FreeView* const view = FindView(stream);
    return view != nullptr ? *view : AddView(stream);
  }
  if (!several_streams) {
    if (views.empty() || views.front()->own_fence() == FenceId::kOpen) {
      FreeView& view = AddView(stream);
      sole_capture = in;
      return view;
    }
    if (FreeView* const view = FindView(stream); view != nullptr && in == sole_capture)
      return *view;
    ExpectSeveralStreams();
  }
  return ProvenView(stream);
}

// The view of a stream that has none yet in this scope.
FreeView& Pool::State::AddView(StreamId stream) {
  if (replays) WaitForReplays(stream);
  const FenceTable::StreamFence fence = fences.ForStream(stream, *scope == ScopeKind::kEager);
  if (views.size() == 1 && views.front()->own_fence() == FenceId::kOpen) {
    views.front()->MakeRoomForFence(fence.id);
    views.front()->Assign(stream, fence.id);
    if (fence.reused) views.front()->Rebuild();
    return *views.front();
  }
  return *views.emplace_back(std::make_unique<FreeView>(space, ranges, stream, fence.id));
}

// pre: the stream is about to work, so it is not destroyed.
void Pool::State::WaitForReplays(StreamId stream) {
  driver.Capture(stream, &frontier);
  if (frontier.held) {
    throw UsageError(
        "cudagraph_pool: eager work allocates on a stream that is capturing a graph. End the "
        "capture first, or allocate on another stream.");
  }
  driver.WaitEvent(stream, replays->get());
}

// What is free now is for no one until the device has been marked, nor is what live blocks leave: a
// graph may have the bytes of either. Throws with nothing changed.
void Pool::State::HoldAllFree() {
  const FenceId held = fences.Held(/*eager=*/true);
  space.ReserveFence(held);
  blocks.ForEach([](Address, LiveBlock& live) { live.GetOthers().behind.reserve(1); });
  fences.HoldAll(held);  // nothing throws from here on
  space.HoldAll(held);
  blocks.ForEach([&](Address, LiveBlock& live) { live.others->behind.assign(1, held); });
  for (const auto& view : views) view->Rebuild();
}

bool Pool::State::PollFences() {
  if (fences.empty()) return false;
  ReserveForWaking();
  if (!fences.Poll()) return false;
  ForgetOpened();
  OpenFences();
  return true;
}

// Live blocks are not behind what is marked as opened any more.
void Pool::State::ForgetOpened() {
  const std::vector<bool>& opened = fences.Opened();
  blocks.ForEach([&](Address, LiveBlock& live) {
    if (!live.others) return;
    std::erase_if(live.others->behind, [&](FenceId fence) { return opened[Index(fence)]; });
  });
}

// So that Wake() and OpenFences() cannot throw as long as no node is freed and no fence made.
void Pool::State::ReserveForWaking() {
  woken.clear();
  ReserveMore(woken, space.free_extents());
  woken_spans.clear();
  ReserveMore(woken_spans, space.free_extents());
  closed.clear();
  ReserveMore(closed, fences.limit());
  for (const auto& view : views) {
    view->MakeRoomForFence(FenceId{static_cast<uint32_t>(fences.limit() - 1)});
  }
}

// What is behind the fences that are marked as opened is everyone's from now on. O(nodes behind
// them). pre: ReserveForWaking().
void Pool::State::OpenFences() {
  const std::vector<bool>& opened = fences.Opened();
  for (const auto& view : views) {
    closed.clear();
    for (uint32_t fence = 1; fence < opened.size(); ++fence) {
      if (opened[fence] && !view->Passes(FenceId{fence})) closed.push_back(FenceId{fence});
    }
    Wake(*view, closed);
  }
  space.OpenFences(opened);
  fences.Clear();
  for (const auto& view : views) {
    for (uint32_t fence = 1; fence < opened.size(); ++fence) {
      if (opened[fence]) view->Refuse(FenceId{fence});
    }
  }
}

// A piece below a page. pre: `within` holds the granule at `offset` of the page, and the view that
// chose the bytes sees them all as free. There is room for what changes, in the space and in all
// views. `large`: the block is of a page or more.
NodeId Pool::State::TakePiece(NodeId within, PageId page, Granules offset, Granules length,
                              bool large) {
  NodeId last = within;
  while (Granules(space.node(last).offset + space.node(last).length) < offset + length) {
    last = space.node(last).next;
  }
  // The nodes beside it, which stay as they are, are forgotten and learned with it: a view may see
  // them without seeing what is taken. All of the page are where it comes to hold a large block.
  const bool all = large && !space.holds_large(page);
  const NodeId before = all ? NodeId::kNone : space.node(within).prev;
  const NodeId behind = all ? NodeId::kNone : space.node(last).next;
  const auto from = [&] { return before == NodeId::kNone ? space.first(page) : before; };
  const auto to = [&] { return behind == NodeId::kNone ? space.last(page) : behind; };
  for (const auto& view : views) view->Forget(page, from(), to());
  const NodeId taken = space.Take(within, page, offset, length);
  if (large) space.AddLargePiece(page);
  for (const auto& view : views) view->Learn(page, from(), to());
  return taken;
}

// Whole pages that follow one another; pre: as above.
NodeId Pool::State::TakePages(PageId page, Granules length) {
  const PageId end{Index(page) + static_cast<uint32_t>(length / page_size)};
  for (const auto& view : views) view->ForgetPages(page, end);
  return space.Take(space.first(page), page, Granules(0), length);
}

void Pool::State::GivePiece(NodeId id, FenceId fence, bool large) {
  const PageSpace::Node node = space.node(id);
  const PageId page = node.page;
  if (space.IsOfWholePages(id)) {
    const PageId end = space.end(id);
    space.Give(id, fence);
    for (const auto& view : views) {
      if (view->Passes(fence)) view->LearnPages(page, end);
    }
    return;
  }
  if (large && space.large_pieces(page) == 1) {
    for (const auto& view : views) view->Forget(page, space.first(page), space.last(page));
    space.Give(id, fence);
    space.DropLargePiece(page);
    for (const auto& view : views) view->Learn(page, space.first(page), space.last(page));
    return;
  }
  for (const auto& view : views) {
    if (!view->Passes(fence)) continue;
    for (const NodeId beside : {node.prev, node.next}) {
      if (beside != NodeId::kNone && !space.node(beside).used()) view->Forget(page, beside, beside);
    }
  }
  if (large) space.DropLargePiece(page);
  const NodeId given = space.Give(id, fence);
  for (const auto& view : views) {
    if (view->Passes(fence)) view->Learn(page, given, given);
  }
}

// Behind what the bytes of a block that was freed must stay.
FenceId Pool::State::FenceFor(const LiveBlock& live) {
  const StreamId stream = live.block.stream;
  const bool in_capture = scope == ScopeKind::kCapture;
  if (in_capture && several_streams) {
    if (const std::optional<FenceId> proof = ProofFenceFor(live)) return *proof;
  }
  // What stands behind a fence that outlives scopes does not wait for captured work.
  const bool behind = live.others && !live.others->behind.empty();
  const bool eager = live.eager || behind;
  const bool used = behind || (live.others && !live.others->uses.empty());
  if (in_capture && !used && !eager && OrderProtects(live)) {
    const FreeView* const view = several_streams ? nullptr : FindView(stream);
    return view != nullptr ? view->own_fence() : fences.ForStream(stream, /*eager=*/false).id;
  }
  if (!scope && !used && !eager) return FenceId::kOpen;
  if (!in_capture && !used) {
    // A graph's output: the stream takes it once it has waited for the replays.
    if (scope && !eager && replays_unknown) return fences.Held(/*eager=*/true);
    return fences.ForStream(stream, /*eager=*/true).id;
  }
  // Eager work on the block is not part of the capture: the capture's end says nothing of it.
  return fences.Held(eager || !in_capture || !AreCapturedTogether(live));
}

// Whether the stream's order is enough to protect a block of a capture scope that its stream alone
// has worked on, and the graph proves nothing of.
bool Pool::State::OrderProtects(const LiveBlock& live) const {
  if (!several_streams) return true;
  // The stream is not capturing, or its frontier would tell. Nor may a capture that is under way
  // have anything of it.
  const bool in_graph = live.view != LiveBlock::kNoView && proofs.capture(live.view) != kNoCapture;
  return !in_graph && !several_captures;
}

bool Pool::State::AreCapturedTogether(const LiveBlock& live) {
  CaptureId of = kNoCapture;
  const auto in_one = [&](StreamId stream) {
    driver.Capture(stream, &frontier);
    if (of == kNoCapture) of = frontier.capture;
    return frontier.capture != kNoCapture && frontier.capture == of;
  };
  return in_one(live.block.stream) &&
         (!live.others || std::ranges::all_of(live.others->uses, in_one));
}

// Whether it does not matter that the block's streams are asked where they stand later than when it is
// freed: by then they are still in the capture that they are in now, which is known without asking.
bool Pool::State::CanAskLater(const LiveBlock& live) const {
  if (live.eager || several_captures) return false;
  if (!live.others) return true;
  const auto is_known = [&](StreamId stream) { return IsKnownToCapture(stream); };
  return live.others->behind.empty() && is_known(live.block.stream) &&
         std::ranges::all_of(live.others->uses, is_known);
}

// Whether the stream is part of the capture, known without asking: from one that is the scope's only
// capture no stream gets away before its end.
bool Pool::State::IsKnownToCapture(StreamId stream) const {
  return capture != kNoCapture && !several_captures && FindProvenView(stream, capture).has_value();
}

// Whether what the stream does now is captured. One that is not part of the capture may join it later.
bool Pool::State::IsCapturedUse(StreamId stream) {
  if (scope != ScopeKind::kCapture) return false;
  if (IsKnownToCapture(stream)) return true;
  if (InOthersCapture()) return false;  // and must not be asked
  driver.Capture(stream, &frontier);
  return frontier.capture != kNoCapture;
}

// What was freed since the last allocation is free from now on, behind its fences. pre: a capture that
// is under way is about to allocate. Throws with what it has not given yet still to be given.
void Pool::State::GiveFreed() {
  if (expects_several_streams) ExpectSeveralStreams();
  expects_several_streams = false;
  while (!freed.empty()) GiveLastFreed(FenceFor(freed.back()));
}

// The capture is over, and its end stands for all that it had of these blocks. But a stream whose use
// another thread recorded may have worked on after it: the device has to be marked then.
void Pool::State::GiveFreedAtEnd() {
  expects_several_streams = false;
  while (!freed.empty()) GiveLastFreed(fences.Held(/*eager=*/freed.back().others != nullptr));
}

void Pool::State::GiveLastFreed(FenceId fence) {
  space.ReserveFence(fence);
  GiveBlock(freed.back(), fence);
  freed.pop_back();
}

// pre: PageSpace::ReserveFence(fence).
void Pool::State::GiveBlock(const LiveBlock& live, FenceId fence) {
  const bool large = live.block.bytes >= page_size.bytes();
  ForEachNode(live, [&](NodeId id) { GivePiece(id, fence, large); });
}

}  // namespace cgp
