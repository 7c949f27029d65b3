// What each FenceId means: what must have happened before everyone may take the bytes behind it.
//
//   stream fence  bytes that one stream freed. Its order protects them, so it takes them at once;
//                 others do when the fence opens
//   held fence    bytes that several streams used (record_stream): nobody takes them until it
//                 opens
//   proof fence   bytes freed in a capture of several streams: the graph under capture proves who
//                 may take them before it opens (proofs.h)
//
// A fence of a capture scope opens when the scope ends, since all its streams have joined by then.
// Eager work goes on after a free, and its stream must not be asked later: the owner may have
// destroyed it. So the whole device is marked instead, with all the work it has been given. That
// would break captures, so it waits until none is under way. Until then eager bytes are their own
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

// Marks the work that the device had been given when this was made. The last owner destroys the
// event.
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

  // The stream's fence, made at its first use. In a capture it is of one scope; eager scopes share
  // it until it opens.
  FenceId ForStream(StreamId stream, bool eager) { return FindOrAdd(stream, eager); }
  // More stands behind the fence, or its stream works on: an earlier mark says nothing of that.
  // Does not throw.
  void Renew(FenceId id) { fences_[Index(id)].mark.reset(); }
  // Whether the fence opens when the scope ends.
  bool OpensAtEnd(FenceId id) const { return fences_[Index(id)].state == State::kScope; }

  // A held fence; it opens by a mark if it is `eager`, else at the end of the scope.
  FenceId Held(bool eager) { return FindOrAdd(std::nullopt, eager); }

  // ForProof() returns a new proof fence. MakeProof() turns a stream's fence into one, with all
  // that is behind it; the stream gets another fence from then on. pre: the fence is the stream's
  // in this scope, which is a capture.
  FenceId ForProof();
  void MakeProof(FenceId stream_fence);

  // These return the fences that open now, in order, and remove them. Valid until the next call of
  // another member.
  using Opened = const std::vector<FenceId>&;

  // The scope ends, which opens the fences of a capture. Does not throw.
  Opened EndScope();

  // Whether a fence stands for work that no mark covers yet.
  bool NeedsMark() const;
  // Marks the device, and so all unmarked fences. Throws DriverError with nothing changed. pre:
  // Driver::MayQuiesce(), and no scope is open.
  std::shared_ptr<SharedEvent> Mark();

  // Opens the fences whose mark the device has passed. Throws DriverError with nothing changed.
  Opened Poll();
  // Opens all fences of eager work, since the device is idle. Does not throw. pre: no scope is
  // open.
  Opened OpenAll();

  bool empty() const;
  // An upper limit on the numbers of fences.
  std::size_t limit() const { return fences_.size(); }

 private:
  enum class State : uint8_t { kUnused, kScope, kEager };

  struct Fence {
    State state = State::kUnused;
    std::optional<StreamId> owner;      // of a stream fence
    std::shared_ptr<SharedEvent> mark;  // of eager work, once the device is marked behind it

    bool needs_mark() const { return state == State::kEager && mark == nullptr; }
  };

  FenceId FindOrAdd(std::optional<StreamId> owner, bool eager);
  FenceId Add(Fence fence);  // with room for it in listed_
  Opened Open();             // what is in opened_

  Driver& driver_;
  std::vector<Fence> fences_;  // by FenceId; the named ones are never used
  // The fences in use without proof fences, of which a capture may have very many.
  std::vector<FenceId> listed_;
  std::vector<FenceId> unused_;  // this and the others have room for fences_
  std::vector<FenceId> opened_;  // by the last call
};

}  // namespace cgp
