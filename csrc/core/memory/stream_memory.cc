#include "core/memory/stream_memory.h"

#include <algorithm>
#include <utility>

#include "core/base/error.h"
#include "core/base/reserve.h"

namespace cgp {

void StreamMemory::BeginScope(ScopeKind kind, bool may_ask_device) {
  CGP_CHECK(!scope_);
  may_ask_device = may_ask_device && driver_.MayQuiesce();
  const bool behind_replays = kind == ScopeKind::kEager && captured_end_ > PageId{0};
  std::shared_ptr<SharedEvent> mark;
  if (may_ask_device && (behind_replays || fences_.NeedsMark())) mark = fences_.Mark();
  Poll();
  // So that a scope in which nothing was done, or whose first block got no memory, ends without; and
  // before anything is held, which one that did not begin would keep from others. A fence may come.
  bytes_.ReserveOpening(fences_.limit() + 2);
  if (behind_replays && !mark) HoldCaptured();
  replays_unknown_ = behind_replays && !mark;
  if (behind_replays) replays_ = std::move(mark);
  scope_ = kind;
  thread_ = std::this_thread::get_id();
}

void StreamMemory::EndScope(bool may_ask_device) {
  CGP_CHECK(scope_);
  const bool captured = *scope_ == ScopeKind::kCapture;
  GiveFreedAtEnd();
  ReserveOpening();
  // Known now, the end of what ran here is known sooner than when the next scope begins.
  if (!captured && fences_.NeedsMark() && may_ask_device && driver_.MayQuiesce()) fences_.Mark();
  // Nothing throws from here on.
  fences_.EndScope();
  bytes_.KeepFirstView();
  OpenFences();
  bytes_.Rest();
  if (captured) {
    ForgetProofs();
    captured_end_ = PageId{bytes_.space().page_count()};
  }
  replays_.reset();
  scope_.reset();
}

FreeView& StreamMemory::BeginTake(LiveBlock& live, std::optional<CaptureId> in) {
  GiveFreed();
  FreeView& view = ViewFor(live, in);
  bytes_.ReserveTake();
  return view;
}

// The view of a stream that has allocated in the open scope, else nullptr.
FreeView* StreamMemory::FindView(StreamId stream) const {
  for (std::size_t i = 0; i < bytes_.stream_count(); ++i) {
    if (bytes_.view(i).stream() == stream) return &bytes_.view(i);
  }
  return nullptr;
}

FreeView& StreamMemory::ViewFor(LiveBlock& live, std::optional<CaptureId> in) {
  const StreamId stream = live.block.stream;
  if (*scope_ == ScopeKind::kEager) {
    FreeView* const view = FindView(stream);
    return view != nullptr ? *view : AddView(stream);
  }
  if (!several_streams_) {
    if (bytes_.stream_count() == 0) {
      FreeView& view = AddView(stream);
      sole_capture_ = in;
      return view;
    }
    if (FreeView* const view = FindView(stream); view != nullptr && in == sole_capture_)
      return *view;
    ExpectSeveralStreams();
  }
  const std::size_t number = ProvenView(stream);
  live.view = static_cast<uint16_t>(number);
  return bytes_.view(number);
}

// The view of a stream that has none yet in this scope.
FreeView& StreamMemory::AddView(StreamId stream) {
  if (replays_) WaitForReplays(stream);
  const FenceId own = fences_.ForStream(stream, *scope_ == ScopeKind::kEager);
  FreeView& view = bytes_.AddView(stream, own);
  fences_.Renew(own);  // so it is the stream's until the scope ends
  return view;
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

// Of live blocks that graphs may have bytes of.
template <typename Function>
void StreamMemory::ForEachCaptured(Function&& function) {
  blocks_.ForEach([&](Address, LiveBlock& live) {
    bool captured = false;
    bytes_.ForEachPiece(live.site, live.length(),
                        [&](PageId page, Granules, Granules) { captured |= page < captured_end_; });
    if (captured) function(live);
  });
}

// What is free now is for no one until the device has been marked, nor is what live blocks leave: a
// graph may have the bytes of either. But not those of pages that eager work has made since the
// last capture, which would otherwise make more in each such scope. Throws with nothing changed.
void StreamMemory::HoldCaptured() {
  const FenceId held = fences_.Held(/*eager=*/true);
  bytes_.ReserveFence(held);
  bytes_.ReserveTake();
  ForEachCaptured([](LiveBlock& live) { ReserveMore(live.GetOthers().behind, 1); });
  bytes_.Hold(captured_end_, held);  // nothing throws from here on
  ForEachCaptured([&](LiveBlock& live) { live.others->AddBehind(held); });
}

bool StreamMemory::Poll() {
  if (fences_.empty()) return false;
  ReserveOpening();
  if (!fences_.Poll()) return false;
  ForgetOpened();
  OpenFences();
  return true;
}

void StreamMemory::OpenAll() {
  fences_.OpenAll();
  ForgetOpened();
  OpenFences();
  // A graph's output that outlived it is still worked on.
  if (blocks_.size() == 0) captured_end_ = PageId{0};
  several_streams_ = false;
}

// Live blocks are not behind what is marked as opened any more.
void StreamMemory::ForgetOpened() {
  const std::vector<FenceId>& opened = fences_.Opened();
  blocks_.ForEach([&](Address, LiveBlock& live) {
    if (!live.others) return;
    std::erase_if(live.others->behind,
                  [&](FenceId fence) { return std::ranges::find(opened, fence) != opened.end(); });
  });
}

// What is behind the fences that are marked as opened is everyone's from now on. pre:
// ReserveOpening().
void StreamMemory::OpenFences() {
  bytes_.Open(fences_.Opened());
  fences_.Clear();
}

FenceId StreamMemory::FenceFor(const LiveBlock& live) {
  const FenceId fence = ChooseFence(live);
  bytes_.ReserveFence(fence);
  return fence;
}

FenceId StreamMemory::ChooseFence(const LiveBlock& live) {
  const StreamId stream = live.block.stream;
  const bool in_capture = scope_ == ScopeKind::kCapture;
  if (in_capture && several_streams_) {
    if (const std::optional<FenceId> proof = ProofFenceFor(live)) return *proof;
  }
  // What stands behind a fence that outlives scopes does not wait for captured work.
  const bool behind = live.others && !live.others->behind.empty();
  const bool eager = live.eager || behind;
  const bool used = behind || (live.others && !live.others->uses.empty());
  if (in_capture && !used && !eager && OrderProtects(live)) {
    const FreeView* const view = several_streams_ ? nullptr : FindView(stream);
    return view != nullptr ? view->own_fence() : fences_.ForStream(stream, /*eager=*/false);
  }
  // Unless a capture is under way that may have used it: a scope of this pool may yet begin within
  // that.
  if (!scope_ && !used && !eager && driver_.MayQuiesce()) return FenceId::kOpen;
  if (!in_capture && !used) {
    // A graph's output: the stream takes it once it has waited for the replays.
    if (scope_ && !eager && replays_unknown_) return fences_.Held(/*eager=*/true);
    return fences_.ForStream(stream, /*eager=*/true);
  }
  // Eager work on the block is not part of the capture: the capture's end says nothing of it.
  return fences_.Held(eager || !in_capture || CollectFrontiers(live) == kNoCapture);
}

// Whether the stream's order is enough to protect a block of a capture scope that its stream alone
// has worked on, and the graph proves nothing of.
bool StreamMemory::OrderProtects(const LiveBlock& live) const {
  if (!several_streams_) return true;
  // The stream is not capturing, or its frontier would tell. Where others are, it may have worked on
  // the block in a body that is over, of which nobody has told.
  const bool in_graph = live.view != LiveBlock::kNoView && proofs_.capture(live.view) != kNoCapture;
  return !in_graph && !several_captures_ && capture_ == kNoCapture;
}

// Whether it does not matter that the block's streams are asked where they stand later than when it
// is freed: by then they are still in the capture that they are in now, which is known without
// asking.
bool StreamMemory::CanAskLater(const LiveBlock& live) const {
  if (live.eager || several_captures_) return false;
  const auto is_known = [&](StreamId stream) { return IsKnownToCapture(stream); };
  if (!live.others) return !several_streams_ || is_known(live.block.stream);
  return live.others->behind.empty() && is_known(live.block.stream) &&
         std::ranges::all_of(live.others->uses, is_known);
}

// Whether the stream is part of the capture, known without asking: from one that is the scope's
// only capture no stream gets away before its end.
bool StreamMemory::IsKnownToCapture(StreamId stream) const {
  return capture_ != kNoCapture && !several_captures_ &&
         FindProvenView(stream, capture_).has_value();
}

// The capture that what the stream does now is part of; kNoCapture if it is of none, or that is not
// known. A stream that is not part of the capture may join it later.
CaptureId StreamMemory::CaptureOfUse(StreamId stream) {
  if (scope_ != ScopeKind::kCapture) return kNoCapture;
  if (IsKnownToCapture(stream)) return capture_;
  if (InOthersCapture()) return kNoCapture;  // and must not be asked
  driver_.Capture(stream, &frontier_);
  return frontier_.capture;
}

void StreamMemory::Free(LiveBlock& live) {
  if (!InOthersCapture()) {
    Give(live, FenceFor(live));
  } else if (CanAskLater(live)) {
    ReserveMore(freed_, 1);
    freed_.push_back(std::move(live));
  } else {
    GiveBehind(live, fences_.Held(/*eager=*/true));
  }
}

void StreamMemory::RecordUse(LiveBlock& live, StreamId stream) {
  if (stream == live.block.stream) return;
  // Then the driver knows of the device, and marks it too.
  if (DeviceOf(stream)) driver_.Capture(stream, &frontier_);
  const CaptureId capture = CaptureOfUse(stream);
  if (InOthersCapture()) {
    expects_several_streams_ = true;
  } else if (scope_ == ScopeKind::kCapture) {
    ExpectSeveralStreams();
    NoteCapture(capture);  // the stream may be part of another one when the block is freed
  }
  live.AddUse(stream);
  // A capture that frees the block would otherwise let its end stand for the end of this use too.
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
  bytes_.Take(live.site, live.length());
}

// What was freed since the last allocation is free from now on, behind its fences. pre: a capture
// that is under way is about to allocate. Throws with what it has not given yet still to be given.
void StreamMemory::GiveFreed() {
  if (expects_several_streams_) ExpectSeveralStreams();
  expects_several_streams_ = false;
  while (!freed_.empty()) {
    Give(freed_.back(), FenceFor(freed_.back()));
    freed_.pop_back();
  }
}

// The capture is over, and its end stands for all that it had of these blocks. But a stream whose
// use another thread recorded may have worked on after it: the device has to be marked then.
void StreamMemory::GiveFreedAtEnd() {
  expects_several_streams_ = false;
  while (!freed_.empty()) {
    GiveBehind(freed_.back(), fences_.Held(/*eager=*/freed_.back().others != nullptr));
    freed_.pop_back();
  }
}

void StreamMemory::GiveBehind(const LiveBlock& live, FenceId fence) {
  bytes_.ReserveFence(fence);
  Give(live, fence);
}

void StreamMemory::Check() const {
  bytes_.Check();
  CGP_CHECK(scope_ || bytes_.stream_count() == 0);
  CGP_CHECK(scope_ == ScopeKind::kCapture || (freed_.empty() && !expects_several_streams_));
  CheckProofs();

  // Live blocks, and freed ones whose bytes are not free yet, are exactly the used nodes.
  const PageSpace& space = bytes_.space();
  uint64_t nodes = 0;
  Granules used;
  const auto check = [&](const LiveBlock& live) {
    Granules of_block;
    bytes_.ForEachNode(live.site, live.length(), [&](NodeId id) {
      CGP_CHECK(space.node(id).used());
      of_block += Granules(space.node(id).length);
      ++nodes;
    });
    CGP_CHECK(of_block == live.length());
    bytes_.ForEachPiece(live.site, live.length(),
                        [&](PageId page, Granules offset, Granules length) {
                          const NodeId id = space.NodeAt(page, offset);
                          const PageSpace::Node& node = space.node(id);
                          CGP_CHECK(node.used() && node.offset == offset.count());
                          CGP_CHECK(space.IsOfWholePages(id) ? length == bytes_.page_size()
                                                             : node.length == length.count());
                        });
    used += of_block;
  };
  std::ranges::for_each(freed_, check);
  blocks_.ForEach([&](Address, const LiveBlock& live) { check(live); });
  uint64_t used_nodes = 0;
  space.ForEachNode([&](NodeId id) { used_nodes += space.node(id).used() ? 1 : 0; });
  CGP_CHECK(nodes == used_nodes);
  CGP_CHECK(used + space.free() == space.page_size() * space.page_count());
}

}  // namespace cgp
