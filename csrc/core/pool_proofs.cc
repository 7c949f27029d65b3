// Who may take which bytes in a capture of several streams: whatever the graph under capture proves
// (proofs.h), for any stream.
//
// A block's bytes are behind the frontiers that its streams have when it is freed. That is what a
// stream must come after to take them: later work of the same streams has nothing to do with them.
#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/pool_state.h"

namespace cgp {

// From now on frees note their frontiers. What the one stream so far has freed is behind what it has
// captured until now, which is no less than what it had when it freed it.
void Pool::State::ExpectSeveralStreams() {
  CGP_CHECK(scope == ScopeKind::kCapture);
  if (several_streams) return;
  FreeView* const view = !views.empty() && views.front()->own_fence() != FenceId::kOpen
                             ? views.front().get()
                             : nullptr;
  if (view == nullptr) {
    several_streams = true;
    return;
  }
  driver.Capture(view->stream(), &frontier);
  const FenceId own = view->own_fence();
  // Nothing that it captures now comes behind what it left in a capture that is over.
  const bool has_left = sole_capture.value_or(frontier.capture) != frontier.capture;
  const bool is_capturing = frontier.capture != kNoCapture && !has_left;
  std::vector<bool> opened;
  try {
    const std::size_t number = proofs.AddStream(has_left ? *sole_capture : frontier.capture);
    if (is_capturing && frontier.nodes.empty()) {
      opened = fences.Opened();
      opened[Index(own)] = true;
    } else if (is_capturing) {
      proofs.Add(own, frontier.capture, frontier.nodes, number);
    }
  } catch (...) {
    proofs.Clear();
    throw;
  }

  // Nothing has changed so far, and nothing below throws.
  several_streams = true;
  NoteCapture(frontier.capture);
  several_captures |= has_left;
  const auto note_view = [&](LiveBlock& live) {
    if (live.block.stream == view->stream()) live.view = 0;
  };
  blocks.ForEach([&](Address, LiveBlock& live) { note_view(live); });
  std::ranges::for_each(freed, note_view);
  if (!opened.empty()) {
    space.OpenFences(opened);
    view->Rebuild();
  } else if (is_capturing || has_left) {
    fences.MakeProof(own);
  }
}

// The view of a stream, with all that is proven to it by now.
FreeView& Pool::State::ProvenView(StreamId stream) {
  driver.Capture(stream, &frontier);
  NoteCapture(frontier.capture);
  std::optional<std::size_t> number = FindProvenView(stream, frontier.capture);
  if (!number) number = AddProvenView(stream);
  ReserveForWaking();
  Wake(*views[*number], proofs.Advance(*number, frontier));
  proofs.HandOver(*number);
  if (!proofs.stopped(*number) || !proofs.relies_on_proofs(*number)) return *views[*number];
  // The stream has gone on without waiting for what came before. What was given to it by proof it may
  // have given itself again since, by its order, which is no proof any more either. So it begins anew,
  // as another stream that nothing is proven to, and leaves behind what it had until now.
  const std::size_t anew = AddProvenView(stream);
  proofs.Stop(anew);
  return *views[anew];
}

// Another view of the stream, in the capture of `frontier`. Throws with nothing changed.
std::size_t Pool::State::AddProvenView(StreamId stream) {
  const std::size_t number = proofs.AddStream(frontier.capture);
  try {
    AddView(stream);
  } catch (...) {
    proofs.RemoveLastStream();
    throw;
  }
  return number;
}

// The newest, since a stream may have begun anew.
std::optional<std::size_t> Pool::State::FindProvenView(StreamId stream, CaptureId of) const {
  for (std::size_t i = proofs.stream_count(); i-- > 0;) {
    if (views[i]->stream() == stream && proofs.capture(i) == of) return i;
  }
  return std::nullopt;
}

uint16_t Pool::State::NumberOf(const FreeView& view) const {
  const auto found = std::ranges::find(views, &view, &std::unique_ptr<FreeView>::get);
  return static_cast<uint16_t>(found - views.begin());
}

// The fence of a block that is freed now; nothing where no proof is possible.
std::optional<FenceId> Pool::State::ProofFenceFor(const LiveBlock& live) {
  if (!CollectFrontiers(live)) return std::nullopt;
  if (nodes.empty()) return FenceId::kOpen;  // the capture has nothing yet that could use it
  const bool used = live.others && !live.others->uses.empty();
  auto owner = used ? std::nullopt : FindProvenView(live.block.stream, frontier.capture);
  if (live.view != LiveBlock::kNoView && owner != live.view) owner.reset();
  if (const auto last = proofs.LastLike(frontier.capture, nodes, owner)) return *last;
  const FenceId fence = fences.ForProof();
  AddProof(fence, owner);
  return fence;
}

// Puts the frontiers of all streams that work on the block into `nodes`. Returns false if they do
// not tell all: work was not captured, or in another capture than the one that frees the block.
bool Pool::State::CollectFrontiers(const LiveBlock& live) {
  if (live.eager || (live.others && !live.others->behind.empty())) return false;
  nodes.clear();
  CaptureId of = kNoCapture;
  const auto collect = [&](StreamId stream) {
    driver.Capture(stream, &frontier);
    if (frontier.capture == kNoCapture) return false;
    if (of == kNoCapture) of = frontier.capture;
    for (const GraphNode node : frontier.nodes) {
      if (std::ranges::find(nodes, node) == nodes.end()) nodes.push_back(node);
    }
    return frontier.capture == of;
  };
  if (live.others && !std::ranges::all_of(live.others->uses, collect)) return false;
  if (!collect(live.block.stream)) return false;
  NoteCapture(of);
  // Where there are several captures, a stream may have left the one that it used the block in.
  if (!several_captures) return true;
  return !live.others && live.view != LiveBlock::kNoView && proofs.capture(live.view) == of;
}

// pre: nothing is behind the fence yet; `nodes` are those of the capture of `frontier`.
void Pool::State::AddProof(FenceId fence, std::optional<std::size_t> owner) {
  for (const auto& view : views) view->MakeRoomForFence(fence);
  proofs.Add(fence, frontier.capture, nodes, owner);
  for (std::size_t i = 0; i < proofs.stream_count(); ++i) {
    if (proofs.IsProven(fence, i)) {
      views[i]->LetThrough(fence);
    } else {
      views[i]->Refuse(fence);
    }
  }
}

// Lets the view through to what is behind these fences. pre: ReserveForWaking().
void Pool::State::Wake(FreeView& view, std::span<const FenceId> proven) {
  if (proven.empty()) return;
  woken.clear();
  for (const FenceId fence : proven) {
    space.ForEachBehind(fence, [this](NodeId id) { woken.push_back(id); });
  }
  const auto place = [&](NodeId id) {
    return std::pair(space.node(id).page, space.node(id).offset);
  };
  std::sort(woken.begin(), woken.end(), [&](NodeId a, NodeId b) { return place(a) < place(b); });
  // Each page's from the first of them to the last, with the nodes beside them.
  std::vector<std::pair<NodeId, NodeId>>& spans = woken_spans;
  spans.clear();
  for (const NodeId id : woken) {
    const PageSpace::Node& node = space.node(id);
    const NodeId last = node.next == NodeId::kNone ? id : node.next;
    if (!spans.empty() && space.node(spans.back().first).page == node.page) {
      spans.back().second = last;
    } else {
      spans.emplace_back(node.prev == NodeId::kNone ? id : node.prev, last);
    }
  }
  for (const auto& [first, last] : spans) {
    if (!space.IsOfWholePages(first)) view.Forget(space.node(first).page, first, last);
  }
  for (const FenceId fence : proven) view.LetThrough(fence);
  for (const auto& [first, last] : spans) {
    const PageId page = space.node(first).page;
    if (space.IsOfWholePages(first)) {
      view.LearnPages(page, space.end(first));
    } else {
      view.Learn(page, first, last);
    }
  }
}

void Pool::State::NoteCapture(CaptureId of) {
  if (of == kNoCapture) return;
  if (capture == kNoCapture) capture = of;
  several_captures |= capture != of;
}

void Pool::State::ForgetProofs() {
  if (!several_streams) return;
  several_streams = proofs.stream_count() > 1;
  capture = kNoCapture;
  several_captures = false;
  proofs.Clear();
  blocks.ForEach([](Address, LiveBlock& live) { live.view = LiveBlock::kNoView; });
}

// Each view passes what is proven to its stream.
void Pool::State::CheckProofs() const {
  space.ForEachNode([&](NodeId id) {
    const FenceId fence = space.node(id).fence;
    if (!proofs.Contains(fence)) return;
    for (std::size_t i = 0; i < proofs.stream_count(); ++i) {
      const bool left_behind = proofs.stopped(i) && proofs.relies_on_proofs(i);
      CGP_CHECK(left_behind || !proofs.IsHandedOver(i) ||
                views[i]->Passes(fence) == proofs.IsProven(fence, i));
    }
  });
}

}  // namespace cgp
