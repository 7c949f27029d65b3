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
// A fence of a capture scope opens when the scope ends, for then all its streams have joined. Eager
// work goes on after what it freed, and nothing may be asked of the stream that it goes on in: its
// owner may have destroyed it. So the device is marked instead, with all that it has been given by
// then; not while anything captures, which that would break. Until then eager bytes are their own
// stream's.
//
//     kScope ------ capture scope ends ------> open
//     kEager --- Mark() ---> with a mark --- the device has got there ---> open
//       ^--- the stream frees more ---/
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/driver.h"
#include "core/memory/page_space.h"

namespace cgp {

// What the device had been given when this was made; the event goes with the last that waits for
// it.
class SharedEvent {
 public:
  explicit SharedEvent(Driver& driver) : driver_(driver), event_(driver.RecordDeviceEvent()) {}
  ~SharedEvent() { driver_.DestroyEvent(event_); }
  SharedEvent(const SharedEvent&) = delete;
  SharedEvent& operator=(const SharedEvent&) = delete;

  Event get() const { return event_; }

 private:
  Driver& driver_;
  const Event event_;
};

class FenceTable {
 public:
  explicit FenceTable(Driver& driver) : driver_(driver), fences_(kNamedFences) {}
  FenceTable(const FenceTable&) = delete;
  FenceTable& operator=(const FenceTable&) = delete;

  // The stream's fence, made at its first use. That of a capture is of one scope; eager work goes
  // on with that of its earlier scopes while it is not open.
  FenceId ForStream(StreamId stream, bool eager) { return FindOrAdd(stream, eager); }
  // More stands behind the fence, or its stream goes on to work: a mark of earlier says nothing of
  // that. Does not throw.
  void Renew(FenceId id) { fences_[Index(id)].mark.reset(); }
  // Whether the fence opens when the scope ends.
  bool OpensAtEnd(FenceId id) const { return fences_[Index(id)].state == State::kScope; }

  // A held fence: with `eager` one that opens by a mark, else at the end of the scope.
  FenceId Held(bool eager) { return FindOrAdd(std::nullopt, eager); }

  // A proof fence that nothing is behind yet; and one that a stream's fence becomes, with what is
  // behind it: the stream gets another one from then on. pre: the fence is the stream's in this
  // scope, which is a capture.
  FenceId ForProof();
  void MakeProof(FenceId stream_fence);

  // These return the fences that are open from now on, in order: they are gone. Valid until the
  // next call of another member.
  using Opened = const std::vector<FenceId>&;

  // The scope ends: the fences of a capture open. Does not throw.
  Opened EndScope();

  // Whether a fence stands for work that no mark is behind yet.
  bool NeedsMark() const;
  // Marks the device, and with it all fences that are unmarked. Throws DriverError with nothing
  // changed. pre: Driver::MayQuiesce(), and no scope is open.
  std::shared_ptr<SharedEvent> Mark();

  // Those open whose mark is passed. Throws DriverError with nothing changed.
  Opened Poll();
  // The device is idle: all that eager work freed is open. Does not throw. pre: no scope is open.
  Opened OpenAll();

  bool empty() const;
  // An upper limit on the numbers of fences.
  std::size_t limit() const { return fences_.size(); }

 private:
  enum class State : uint8_t { kUnused, kScope, kEager };

  struct Fence {
    State state = State::kUnused;
    std::optional<StreamId> owner;      // of a stream fence
    std::shared_ptr<SharedEvent> mark;  // of eager work, once the device is marked behind that

    bool needs_mark() const { return state == State::kEager && mark == nullptr; }
  };

  FenceId FindOrAdd(std::optional<StreamId> owner, bool eager);
  FenceId Add(Fence fence);  // with room for it in listed_
  Opened Open();             // what is in opened_

  Driver& driver_;
  std::vector<Fence> fences_;  // by FenceId; the named ones are never used
  // Of the fences in use those that are no proof fences: a capture may have very many of these.
  std::vector<FenceId> listed_;
  std::vector<FenceId> unused_;  // this and the others have room for fences_
  std::vector<FenceId> opened_;  // those that were last
};

}  // namespace cgp
