// Who may take which bytes, and that all views know.
#include <algorithm>
#include <utility>

#include "core/pool_state.h"

namespace cgp {

// The view of a stream that has allocated in the open scope, else nullptr.
FreeView* Pool::State::FindView(StreamId stream) const {
  for (const auto& view : views) {
    if (view->stream() == stream && view->own_fence() != FenceId::kOpen) return view.get();
  }
  return nullptr;
}

FreeView& Pool::State::ViewFor(StreamId stream) {
  if (several_streams && *scope == ScopeKind::kCapture) return ProvenView(stream);
  if (FreeView* const view = FindView(stream)) return *view;
  const bool first = views.empty() || views.front()->own_fence() == FenceId::kOpen;
  if (!first && *scope == ScopeKind::kCapture) {
    ExpectSeveralStreams();
    return ProvenView(stream);
  }
  return AddView(stream);
}

// The view of a stream that has none yet in this scope.
FreeView& Pool::State::AddView(StreamId stream) {
  const FenceTable::StreamFence fence = fences.ForStream(stream, *scope == ScopeKind::kEager);
  if (views.size() == 1 && views.front()->own_fence() == FenceId::kOpen) {
    views.front()->Assign(stream, fence.id);
    if (fence.reused) views.front()->Rebuild();
    return *views.front();
  }
  return *views.emplace_back(std::make_unique<FreeView>(space, ranges, stream, fence.id));
}

bool Pool::State::PollFences() {
  if (fences.empty() || !fences.Poll()) return false;
  const std::vector<bool> opened = fences.Opened();
  blocks.ForEach([&](Address, LiveBlock& live) {
    if (!live.others) return;
    std::erase_if(live.others->behind, [&](FenceId fence) { return opened[Index(fence)]; });
  });
  OpenFences();
  return true;
}

// What is behind the fences that are marked as opened is everyone's from now on. O(nodes behind
// them).
void Pool::State::OpenFences() {
  const std::vector<bool> opened = fences.Opened();
  for (const auto& view : views) {
    std::vector<FenceId> closed;
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

// pre: `within` holds the granule at `offset` of its page, and the view that chose the bytes sees
// them all as free.
NodeId Pool::State::TakePiece(NodeId within, Granules offset, Granules length) {
  NodeId last = within;
  while (Granules(space.node(last).offset + space.node(last).length) < offset + length) {
    last = space.node(last).next;
  }
  // The nodes beside it, which stay as they are, are forgotten and learned with it: a view may see
  // them without seeing what is taken.
  const NodeId before = space.node(within).prev;
  const NodeId behind = space.node(last).next;
  const NodeId from = before == NodeId::kNone ? within : before;
  for (const auto& view : views) view->Forget(from, behind == NodeId::kNone ? last : behind);
  const NodeId taken = space.Take(within, offset, length);
  const NodeId to = behind == NodeId::kNone ? space.last(space.node(taken).page) : behind;
  for (const auto& view : views) view->Learn(from, to);
  return taken;
}

void Pool::State::GivePiece(NodeId id, FenceId fence) {
  const PageSpace::Node node = space.node(id);
  for (const auto& view : views) {
    if (!view->Passes(fence)) continue;
    for (const NodeId beside : {node.prev, node.next}) {
      if (beside != NodeId::kNone && !space.node(beside).used()) view->Forget(beside, beside);
    }
  }
  const NodeId given = space.Give(id, fence);
  for (const auto& view : views) {
    if (view->Passes(fence)) view->Learn(given, given);
  }
}

// Behind what the bytes of a block that is freed now must stay.
FenceId Pool::State::FenceFor(const LiveBlock& live) {
  const StreamId stream = live.block.stream;
  const bool in_capture = scope == ScopeKind::kCapture;
  if (in_capture && several_streams) {
    if (const std::optional<FenceId> proof = ProofFenceFor(live)) return *proof;
  }
  bool eager = live.eager;
  std::vector<StreamId> streams;
  if (live.others) {
    streams = live.others->uses;
    // No fence that outlives a scope waits for captured work.
    eager |= !live.others->behind.empty();
    for (const FenceId fence : live.others->behind) {
      for (const StreamId other : fences.StreamsBehind(fence)) {
        if (other != stream && std::ranges::find(streams, other) == streams.end())
          streams.push_back(other);
      }
    }
  }
  const bool used = !streams.empty();
  if (in_capture && !used && !eager && OrderProtects(live)) {
    const FreeView* const view = several_streams ? nullptr : FindView(stream);
    return view != nullptr ? view->own_fence() : fences.ForStream(stream, /*eager=*/false).id;
  }
  if (scope == ScopeKind::kEager && !used) return fences.ForStream(stream, /*eager=*/true).id;
  if (!scope && !used && !eager) return FenceId::kOpen;
  streams.push_back(stream);
  if (!scope) return fences.After(streams);
  // Eager work on the block is not part of the capture: the capture's end says nothing of it.
  return fences.Held(streams, eager || !in_capture || !AreCapturedTogether(streams));
}

// Whether the stream's order is enough to protect a block of a capture scope that its stream alone
// has worked on, and the graph proves nothing of.
bool Pool::State::OrderProtects(const LiveBlock& live) const {
  if (!several_streams) return true;
  // The stream is not capturing, or its frontier would tell. Nor may a capture that is under way
  // have anything of it.
  const bool captured = live.view != LiveBlock::kNoView && proofs.capture(live.view) != kNoCapture;
  return !captured && !several_captures;
}

bool Pool::State::AreCapturedTogether(std::span<const StreamId> streams) {
  CaptureId of = kNoCapture;
  return std::ranges::all_of(streams, [&](StreamId stream) {
    driver.Capture(stream, &frontier);
    if (of == kNoCapture) of = frontier.capture;
    return frontier.capture != kNoCapture && frontier.capture == of;
  });
}

void Pool::State::GiveBlock(const LiveBlock& live, FenceId fence) {
  if (live.node != NodeId::kNone) {
    GivePiece(live.node, fence);
    return;
  }
  bool first = true;
  ForEachPiece(live, [&](PageId page, Granules, Granules) {
    // A block of several pieces goes on at a page's end and comes in at a page's start.
    GivePiece(first ? space.last(page) : space.first(page), fence);
    first = false;
  });
}

}  // namespace cgp
