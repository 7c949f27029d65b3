#include "core/fences.h"

#include <algorithm>
#include <utility>

namespace cgp {

FenceTable::~FenceTable() {
  for (Fence& fence : fences_) Destroy(fence.events);
}

FenceTable::StreamFence FenceTable::ForStream(StreamId stream, bool eager) {
  const State state = eager ? State::kScopeThenEvents : State::kScope;
  for (std::size_t i = 1; i < fences_.size(); ++i) {
    Fence& fence = fences_[i];
    if (fence.state == State::kUnused || fence.owner != stream || fence.eager != eager) continue;
    // Events of an earlier scope say nothing of what this one will do: they are recorded anew when
    // it ends.
    Destroy(fence.events);
    fence.state = state;
    return {static_cast<FenceId>(i), true};
  }
  return {Add({.state = state, .owner = stream, .eager = eager, .streams = {stream}, .events = {}}),
          false};
}

FenceId FenceTable::Held(std::span<const StreamId> streams, bool events) {
  const State state = events ? State::kScopeThenEvents : State::kScope;
  for (std::size_t i = 1; i < fences_.size(); ++i) {
    Fence& fence = fences_[i];
    if (fence.state != state || fence.owner) continue;
    for (const StreamId stream : streams) {
      if (std::ranges::find(fence.streams, stream) == fence.streams.end())
        fence.streams.push_back(stream);
    }
    return static_cast<FenceId>(i);
  }
  return Add({.state = state,
              .owner = {},
              .eager = events,
              .streams = {streams.begin(), streams.end()},
              .events = {}});
}

FenceId FenceTable::After(std::span<const StreamId> streams) {
  std::vector<Event> events = Record(streams);
  return Add({.state = State::kEvents,
              .owner = {},
              .eager = true,
              .streams = {streams.begin(), streams.end()},
              .events = std::move(events)});
}

void FenceTable::EndScope() {
  std::vector<std::pair<Fence*, std::vector<Event>>> recorded;
  try {
    for (Fence& fence : fences_) {
      if (fence.state == State::kScopeThenEvents)
        recorded.emplace_back(&fence, Record(fence.streams));
    }
  } catch (...) {
    for (auto& [fence, events] : recorded) Destroy(events);
    throw;
  }
  for (auto& [fence, events] : recorded) {
    fence->events = std::move(events);
    fence->state = State::kEvents;
  }
  for (Fence& fence : fences_) {
    if (fence.state == State::kScope) fence.state = State::kOpened;
  }
}

bool FenceTable::Poll() {
  // All are asked before any is marked, so that a failing driver leaves no fence half-way.
  std::vector<Fence*> done;
  for (Fence& fence : fences_) {
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

bool FenceTable::empty() const {
  return std::ranges::all_of(fences_,
                             [](const Fence& fence) { return fence.state == State::kUnused; });
}

std::vector<bool> FenceTable::Opened() const {
  std::vector<bool> opened(fences_.size());
  for (std::size_t i = 0; i < fences_.size(); ++i) opened[i] = fences_[i].state == State::kOpened;
  return opened;
}

uint32_t FenceTable::scope_fence_count() const {
  return static_cast<uint32_t>(std::ranges::count_if(fences_, [](const Fence& fence) {
    return fence.state == State::kScope || fence.state == State::kScopeThenEvents;
  }));
}

void FenceTable::Clear() {
  for (Fence& fence : fences_) {
    if (fence.state == State::kOpened) fence = Fence{};
  }
}

FenceId FenceTable::Add(Fence fence) {
  for (std::size_t i = 1; i < fences_.size(); ++i) {
    if (fences_[i].state != State::kUnused) continue;
    fences_[i] = std::move(fence);
    return static_cast<FenceId>(i);
  }
  fences_.push_back(std::move(fence));
  return static_cast<FenceId>(fences_.size() - 1);
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
