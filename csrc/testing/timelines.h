// Streams as a test's device has them: work that is done only when the test says so, and which of
// it runs behind which. Any thread may call.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <utility>

#include "core/driver.h"

namespace cgp {

// So much of each stream's work, from its first.
using Clock = std::map<StreamId, uint64_t>;
inline void Join(Clock* clock, const Clock& other) {
  for (const auto& [stream, work] : other) (*clock)[stream] = std::max((*clock)[stream], work);
}

class Timelines {
  struct Stream {
    uint64_t submitted = 0;
    Clock behind_next;
    std::deque<std::pair<Clock, std::function<void()>>> pending;  // with what it runs behind
    uint64_t done() const { return submitted - pending.size(); }
  };
  template <typename Member>
  auto Of(StreamId stream, Member member) const {
    static const Stream kNew;
    const std::lock_guard lock(mutex_);
    const auto it = streams_.find(stream);
    return std::invoke(member, it == streams_.end() ? kNew : it->second);
  }

 public:
  // Work is numbered per stream from 1 in the order of submission, and done in that order, behind
  // all that the stream was told to wait for. `action` happens when it is done.
  uint64_t Submit(StreamId stream, std::function<void()> action = nullptr) {
    const std::lock_guard lock(mutex_);
    Stream& one = streams_[stream];
    one.pending.emplace_back(one.behind_next, std::move(action));
    return one.behind_next[stream] = ++one.submitted;
  }
  void Wait(StreamId stream, const Clock& clock) {
    const std::lock_guard lock(mutex_);
    Join(&streams_[stream].behind_next, clock);
  }

  // What the stream's next work runs behind, as an event that is recorded on it has it.
  Clock Now(StreamId stream) const { return Of(stream, &Stream::behind_next); }
  // All that is submitted by now, as a marked device has it.
  Clock TakeMark() const {
    const std::lock_guard lock(mutex_);
    Clock mark;
    for (const auto& [id, stream] : streams_) mark.emplace(id, stream.submitted);
    return mark;
  }
  uint64_t Submitted(StreamId stream) const { return Of(stream, &Stream::submitted); }
  bool Done(StreamId stream, uint64_t work) const { return Of(stream, &Stream::done) >= work; }
  bool Passed(const Clock& clock) const {
    return std::ranges::all_of(clock,
                               [this](const auto& part) { return Done(part.first, part.second); });
  }
  // Whether what is submitted to `waiting` from now on begins when that work is done.
  bool IsBehind(StreamId waiting, StreamId stream, uint64_t work) const {
    return Done(stream, work) || Now(waiting)[stream] >= work;
  }

  // Does the stream's work up to number `work`, and what that runs behind.
  void Finish(StreamId stream, uint64_t work) {
    while (true) {
      std::pair<Clock, std::function<void()>> next;
      {
        const std::lock_guard lock(mutex_);
        Stream& one = streams_[stream];
        if (one.pending.empty() || one.done() >= work) return;
        next = std::move(one.pending.front());
        one.pending.pop_front();
      }
      // Not under the lock: it takes other streams' work. Nobody looks at this one in between.
      Finish(next.first);
      if (next.second) next.second();
    }
  }
  void Finish(const Clock& clock) {
    for (const auto& [stream, work] : clock) Finish(stream, work);
  }
  void FinishAll() { Finish(TakeMark()); }
  // What is pending counts as done, and nobody does it any more.
  void Drop() {
    const std::lock_guard lock(mutex_);
    for (auto& [stream, one] : streams_) one.pending.clear();
  }
  // Does up to `count` more of the stream's submitted work.
  void Progress(StreamId stream, uint64_t count) {
    Finish(stream, Of(stream, &Stream::done) + count);
  }

 private:
  mutable std::mutex mutex_;
  std::map<StreamId, Stream> streams_;
};

}  // namespace cgp
