// What each FenceId means: what must have happened before the bytes behind it may be taken by
// everyone.
//
//   stream fence  bytes that one stream freed: that stream takes them at once, since its order
//                 protects them; the others when it opens
//   held fence    bytes that several streams used (record_stream): nobody takes them until it
//                 opens
//   proof fence   bytes freed in a capture of several streams: who may take them before it opens is
//                 for the graph under capture to prove (proofs.h)
//
// A fence of a capture scope opens when the scope ends, for then all its streams have joined. Work
// of an eager scope goes on after its end: its fences open once events recorded then have
// completed. Bytes freed outside any scope whose work may still be running get a fence with events
// recorded at the free. On a stream that a capture for another pool holds, or would suffer from,
// they are recorded once none does.
//
//     kScope ----- capture scope ends -----> open
//     kScopeThenEvents --- any scope ends ---> kEvents --- events done ---> open
//                              \-- a stream captures --> kLateEvents --- none does ---> kEvents
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/page_space.h"
#include "driver/driver.h"

namespace cgp {

class FenceTable {
 public:
  explicit FenceTable(Driver& driver) : driver_(driver), fences_(1) {}
  ~FenceTable();
  FenceTable(const FenceTable&) = delete;
  FenceTable& operator=(const FenceTable&) = delete;

  // The stream's fence in this scope, made at its first use; an eager scope goes on with the fence
  // of the stream's earlier eager scopes while that is not open. `reused` says whether bytes may be
  // behind it already.
  struct StreamFence {
    FenceId id{};
    bool reused = false;
  };
  StreamFence ForStream(StreamId stream, bool eager);

  // A fence that opens when the scope ends and, with `events`, when what these streams then have in
  // flight is done.
  FenceId Held(std::span<const StreamId> streams, bool events);

  // A fence behind what these streams have in flight now.
  FenceId After(std::span<const StreamId> streams);

  // A proof fence that nothing is behind yet; and one that a stream's fence becomes, with what is
  // behind it: the stream gets another one from then on. pre: the fence is the stream's in this
  // scope, which is a capture.
  FenceId ForProof();
  void MakeProof(FenceId stream_fence);

  // Whose work the bytes behind the fence wait for; nobody's behind kOpen.
  std::span<const StreamId> StreamsBehind(FenceId fence) const {
    return fences_[Index(fence)].streams;
  }

  // The scope ends: marks in Opened() the fences that are now open. Throws DriverError with nothing
  // changed.
  void EndScope();
  // Marks those whose events are done; returns whether there were any. Throws DriverError with
  // nothing changed.
  bool Poll();

  bool empty() const;
  // An upper limit on the numbers of fences.
  std::size_t limit() const { return fences_.size(); }
  // By FenceId: which were marked since Clear(); valid until the next call of another member. They
  // are gone for good with Clear(). Neither throws.
  const std::vector<bool>& Opened();
  // How many fences of this scope are not kEvents.
  uint32_t scope_fence_count() const;
  void Clear();

 private:
  enum class State : uint8_t { kUnused, kScope, kScopeThenEvents, kLateEvents, kEvents, kOpened };

  struct Fence {
    State state = State::kUnused;
    std::optional<StreamId> owner;  // of a stream fence
    bool eager = false;
    std::vector<StreamId> streams;  // whose work it stands behind
    std::vector<Event> events;      // kEvents only
  };

  // So that the next Add() cannot throw.
  void ReserveOne();
  FenceId Add(Fence fence);
  std::vector<Event> Record(std::span<const StreamId> streams);
  // Records the fence's events, or leaves that for later. Throws with nothing changed.
  void RecordOrWait(Fence& fence);
  bool AnyCaptures(std::span<const StreamId> streams);
  void Destroy(std::vector<Event>& events);

  Driver& driver_;
  std::vector<Fence> fences_;  // by FenceId; the first, kOpen, is never used
  // Of the fences in use those that are no proof fences: a capture may have very many of these.
  std::vector<FenceId> listed_;
  std::vector<FenceId> unused_;
  std::vector<bool>
      opened_;         // what Opened() returned last; this and the others have room for fences_
  Frontier frontier_;  // what was asked last; kept for its memory
};

}  // namespace cgp
