#include "core/fences.h"

#include <algorithm>
#include <utility>

#include "core/reserve.h"

namespace cgp {

FenceTable::~FenceTable() {
  for (Fence& fence : fences_) Destroy(fence.events);
}

FenceTable::StreamFence FenceTable::ForStream(StreamId stream, bool eager) {
  const State state = eager ? State::kScopeThenEvents : State::kScope;
  for (const FenceId id : listed_) {
    Fence& fence = fences_[Index(id)];
    if (fence.owner != stream || fence.eager != eager) continue;
    // Events of an earlier scope say nothing of what this one will do: they are recorded anew when
    // it ends.
    Destroy(fence.events);
    fence.state = state;
    return {id, true};
  }
  return {Add({.state = state, .owner = stream, .eager = eager, .streams = {stream}, .events = {}}),
          false};
}

FenceId FenceTable::Held(std::span<const StreamId> streams, bool events) {
  const State state = events ? State::kScopeThenEvents : State::kScope;
  for (const FenceId id : listed_) {
    Fence& fence = fences_[Index(id)];
    if (fence.state != state || fence.owner) continue;
    for (const StreamId stream : streams) {
      if (std::ranges::find(fence.streams, stream) == fence.streams.end())
        fence.streams.push_back(stream);
    }
    return id;
  }
  return Add({.state = state,
              .owner = {},
              .eager = events,
              .streams = {streams.begin(), streams.end()},
              .events = {}});
}

FenceId FenceTable::After(std::span<const StreamId> streams) {
  ReserveOne();
  Fence fence{.state = State::kLateEvents,
              .owner = {},
              .eager = true,
              .streams = {streams.begin(), streams.end()},
              .events = {}};
  RecordOrWait(fence);
  return Add(std::move(fence));
}

FenceId FenceTable::ForProof() {
  const FenceId id = Add({.state = State::kScope, .owner = {}, .streams = {}, .events = {}});
  listed_.pop_back();
  return id;
}

void FenceTable::MakeProof(FenceId stream_fence) {
  std::erase(listed_, stream_fence);
  fences_[Index(stream_fence)].owner.reset();
}

void FenceTable::EndScope() {
  std::vector<std::pair<FenceId, Fence>> ended;
  try {
    for (const FenceId id : listed_) {
      if (fences_[Index(id)].state != State::kScopeThenEvents) continue;
      ended.emplace_back(id, fences_[Index(id)]);
      RecordOrWait(ended.back().second);
    }
  } catch (...) {
    for (auto& [id, fence] : ended) Destroy(fence.events);
    throw;
  }
  for (auto& [id, fence] : ended) fences_[Index(id)] = std::move(fence);
  for (Fence& fence : fences_) {
    if (fence.state == State::kScope) fence.state = State::kOpened;
  }
}

bool FenceTable::Poll() {
  // All are asked before any is marked, so that a failing driver leaves no fence half-way.
  std::vector<Fence*> done;
  for (const FenceId id : listed_) {
    Fence& fence = fences_[Index(id)];
    if (fence.state == State::kLateEvents) RecordOrWait(fence);
    if (fence.state != State::kEvents) continue;
    if (std::ranges::all_of(fence.events, [&](Event event) { return driver_.EventDone(event); })) {
      done.push_back(&fence);
    }
  }
  for (Fence* fence : done) {
    Destroy(fence->events);
    fence->state = State::kOpened;
  }
  return !done.empty();
}

bool FenceTable::empty() const { return fences_.size() == 1 + unused_.size(); }

const std::vector<bool>& FenceTable::Opened() {
  opened_.resize(fences_.size());
  for (std::size_t i = 0; i < fences_.size(); ++i) opened_[i] = fences_[i].state == State::kOpened;
  return opened_;
}

uint32_t FenceTable::scope_fence_count() const {
  return static_cast<uint32_t>(std::ranges::count_if(fences_, [](const Fence& fence) {
    return fence.state == State::kScope || fence.state == State::kScopeThenEvents;
  }));
}

void FenceTable::Clear() {
  for (std::size_t i = 1; i < fences_.size(); ++i) {
    if (fences_[i].state != State::kOpened) continue;
    fences_[i] = Fence{};
    unused_.push_back(static_cast<FenceId>(i));
  }
  std::erase_if(listed_, [&](FenceId id) { return fences_[Index(id)].state == State::kUnused; });
}

void FenceTable::ReserveOne() {
  ReserveMore(fences_, 1);
  for (auto* const ids : {&listed_, &unused_}) ids->reserve(fences_.capacity());
  opened_.reserve(fences_.capacity());
}

FenceId FenceTable::Add(Fence fence) {
  ReserveOne();
  FenceId id{static_cast<uint32_t>(fences_.size())};
  if (unused_.empty()) {
    fences_.push_back(std::move(fence));
  } else {
    id = unused_.back();
    unused_.pop_back();
    fences_[Index(id)] = std::move(fence);
  }
  listed_.push_back(id);
  return id;
}

void FenceTable::RecordOrWait(Fence& fence) {
  if (AnyCaptures(fence.streams)) {
    fence.state = State::kLateEvents;
    return;
  }
  fence.events = Record(fence.streams);
  fence.state = State::kEvents;
}

bool FenceTable::AnyCaptures(std::span<const StreamId> streams) {
  return std::ranges::any_of(streams, [&](StreamId stream) {
    driver_.Capture(stream, &frontier_);
    return frontier_.held;
  });
}

std::vector<Event> FenceTable::Record(std::span<const StreamId> streams) {
  std::vector<Event> events;
  events.reserve(streams.size());
  try {
    for (const StreamId stream : streams) events.push_back(driver_.RecordEvent(stream));
  } catch (...) {
    Destroy(events);
    throw;
  }
  return events;
}

void FenceTable::Destroy(std::vector<Event>& events) {
  for (const Event event : events) driver_.DestroyEvent(event);
  events.clear();
}

}  // namespace cgp
