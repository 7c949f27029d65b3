// Which stream may take which bytes in a capture of several streams: what the graph under capture
// proves to be over (proofs.h).
#include "core/base/error.h"
#include "core/memory/stream_memory.h"

namespace cgp {

// From now on frees note their frontiers. What the only stream has freed so far gets the frontier
// of now, which is no earlier than the one it had at the free.
void StreamMemory::ExpectSeveralStreams() {
  CGP_CHECK(scope_ == ScopeKind::kCapture);
  if (several_streams_) return;
  if (bytes_.stream_count() == 0) {
    several_streams_ = true;
    return;
  }
  FreeList& list = bytes_.free_list(0);
  driver_.Capture(list.stream(), &frontier_);
  const FenceId own = list.own_fence();
  // Nothing that it captures now comes after what it freed in a capture that is over.
  const bool has_left = sole_capture_.value_or(frontier_.capture) != frontier_.capture;
  const bool is_capturing = frontier_.capture != kNoCapture && !has_left;
  const bool opens = is_capturing && frontier_.nodes.empty();
  ReserveOpening();
  try {
    const std::size_t number = proofs_.AddStream(has_left ? *sole_capture_ : frontier_.capture);
    if (is_capturing && !opens) proofs_.Add(own, frontier_.capture, frontier_.nodes, number);
  } catch (...) {
    proofs_.Clear();
    throw;
  }

  // Nothing has changed so far, and nothing below throws.
  several_streams_ = true;
  NoteCapture(frontier_.capture);
  several_captures_ |= has_left;
  if (opens) {
    bytes_.Open(std::span(&own, 1));
    list.SetPasses(own, true);  // for what the stream frees behind it later
  } else if (is_capturing || has_left) {
    fences_.MakeProof(own);
  }
}

// The number of a stream's free list, with all that is proven to the stream by now.
std::size_t StreamMemory::ProvenFreeList(StreamId stream) {
  driver_.Capture(stream, &frontier_);
  NoteCapture(frontier_.capture);
  std::optional<std::size_t> number = FindFreeList(stream, frontier_.capture);
  if (!number) number = AddProvenFreeList(stream);
  ReserveOpening();
  const std::span<const FenceId> proven = proofs_.Advance(*number, frontier_);
  if (proofs_.must_forfeit(*number)) {
    Forfeit(*number);
  } else {
    bytes_.SetPasses(bytes_.free_list(*number), proven, true);
    proofs_.HandOver(*number);
  }
  return *number;
}

// The stream has gone on without waiting for earlier work. It may have reused, by its own order,
// what it got by a proof, and neither protects that any more. So it gives up all that it has so
// far. Throws with nothing changed.
void StreamMemory::Forfeit(std::size_t number) {
  FreeList& list = bytes_.free_list(number);
  std::vector<FenceId> fences;
  for (uint32_t i = 0; i < fences_.limit(); ++i) {
    if (proofs_.Contains(FenceId{i}) && list.Passes(FenceId{i})) fences.push_back(FenceId{i});
  }
  tenures_[number] = ++last_tenure_;
  bytes_.SetPasses(list, fences, false);
  proofs_.Forfeit(number);
}

// Adds a free list for the stream in the capture of `frontier`. Throws with nothing changed.
std::size_t StreamMemory::AddProvenFreeList(StreamId stream) {
  const std::size_t number = proofs_.AddStream(frontier_.capture);
  try {
    AddFreeList(stream);
  } catch (...) {
    proofs_.RemoveLastStream();
    throw;
  }
  return number;
}

// The fence of a block that is freed now, behind `nodes_` of that capture; `owner` alone worked on
// it.
FenceId StreamMemory::ProofFence(CaptureId of, std::optional<std::size_t> owner) {
  if (nodes_.empty()) return FenceId::kOpen;  // nothing is captured yet that could use it
  if (const auto last = proofs_.LastLike(of, nodes_, owner)) return *last;
  const FenceId fence = fences_.ForProof();
  for (std::size_t i = 0; i < bytes_.stream_count(); ++i)
    bytes_.free_list(i).MakeRoomForFence(fence);
  proofs_.Add(fence, of, nodes_, owner);
  for (std::size_t i = 0; i < proofs_.stream_count(); ++i) {
    bytes_.free_list(i).SetPasses(fence, proofs_.IsLeased(fence, i));
  }
  return fence;
}

// The one capture of all streams that work on the block, with their frontiers in `nodes_`;
// kNoCapture if they have none in common.
CaptureId StreamMemory::CollectFrontiers(const LiveBlock& live) {
  nodes_.clear();
  CaptureId of = kNoCapture;
  const auto collect = [&](StreamId stream) {
    driver_.Capture(stream, &frontier_);
    if (frontier_.capture == kNoCapture) return false;
    if (of == kNoCapture) of = frontier_.capture;
    for (const GraphNode node : frontier_.nodes) {
      if (std::ranges::find(nodes_, node) == nodes_.end()) nodes_.push_back(node);
    }
    return frontier_.capture == of;
  };
  if (live.others && !std::ranges::all_of(live.others->uses, collect)) return kNoCapture;
  return collect(live.block.stream) ? of : kNoCapture;
}

void StreamMemory::NoteCapture(CaptureId of) {
  if (of == kNoCapture) return;
  if (capture_ == kNoCapture) capture_ = of;
  several_captures_ |= capture_ != of;
}

void StreamMemory::DropProofs() {
  if (!several_streams_) return;
  several_streams_ = proofs_.stream_count() > 1;
  capture_ = kNoCapture;
  several_captures_ = false;
  proofs_.Clear();
}

// Each free list passes all that is leased to its stream.
void StreamMemory::CheckProofs() const {
  bytes_.space().ForEachNode([&](NodeId id) {
    const FenceId fence = bytes_.space().node(id).fence;
    if (!proofs_.Contains(fence)) return;
    for (std::size_t i = 0; i < proofs_.stream_count(); ++i) {
      if (proofs_.must_forfeit(i) || !proofs_.IsHandedOver(i)) continue;
      const bool passes = bytes_.free_list(i).Passes(fence);
      CGP_CHECK(passes ? proofs_.IsProven(fence, i) : !proofs_.IsLeased(fence, i));
    }
  });
}

}  // namespace cgp
