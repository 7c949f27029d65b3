// Who may take which bytes in a capture of several streams: whatever the graph under capture proves
// (proofs.h), for any stream.
#include "core/base/error.h"
#include "core/memory/stream_memory.h"

namespace cgp {

// From now on frees note their frontiers. What the one stream so far has freed is behind what it
// has captured until now, which is no less than what it had when it freed it.
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
  // Nothing that it captures now comes behind what it left in a capture that is over.
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
    list.SetPasses(own, true);  // what the stream comes to free behind it
  } else if (is_capturing || has_left) {
    fences_.MakeProof(own);
  }
}

// The number of a stream's free list, which has all that is proven to it by now.
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

// The stream has gone on without waiting for what came before. What was given to it by proof it may
// have given itself again since, by its order, which is no proof any more either. So it leaves
// behind all that it had until now. Throws with nothing changed.
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

// A free list of the stream in the capture of `frontier`. Throws with nothing changed.
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

// Of a block that is freed now, behind `nodes_` of that capture; `owner` alone has worked on it.
FenceId StreamMemory::ProofFence(CaptureId of, std::optional<std::size_t> owner) {
  if (nodes_.empty()) return FenceId::kOpen;  // the capture has nothing yet that could use it
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

// The capture that all streams are in that work on the block, with their frontiers in `nodes_`;
// kNoCapture if there is no such capture.
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

// Each free list passes what is leased to its stream.
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
