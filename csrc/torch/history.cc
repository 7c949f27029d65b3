#include "torch/history.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace cgp {
namespace {

// Of the code that torch.compile is compiling in this thread, innermost last.
thread_local std::vector<std::string> compile_contexts;

void RethrowIfAny(const std::exception_ptr& error) {
  if (error != nullptr) std::rethrow_exception(error);
}

}  // namespace

History& History::Get() {
  static auto* const history = new History;  // never destroyed, as the pools
  return *history;
}

void History::Configure(bool enabled, c10::CachingDeviceAllocator::CreateContextFn recorder,
                        size_t max_entries, When when, bool clear,
                        const std::vector<std::string>& skip_actions) {
  std::set<Action> skipped;
  for (const std::string& action : skip_actions) {
    skipped.insert(c10::CachingDeviceAllocator::parseTraceEntryAction(action));
  }
  const std::lock_guard lock(mutex_);
  enabled_ = enabled;
  recorder_.store(enabled ? recorder : nullptr);
  when_.store(enabled ? when : When::NEVER);
  max_entries_ = max_entries;
  skipped_ = std::move(skipped);
  if (!enabled || clear) entries_.clear();
  for (auto& [device, entries] : entries_) {
    while (entries.size() > max_entries) entries.pop_front();
  }
  if (!enabled) live_.clear();
  active_.store(enabled || !trackers_.empty(), std::memory_order_release);
}

void History::AttachTracker(Tracker tracker) {
  const std::lock_guard lock(mutex_);
  trackers_.push_back(std::move(tracker));
  active_.store(true, std::memory_order_release);
}

History::Context History::Gather(When level) const {
  const auto recorder = recorder_.load();
  return recorder != nullptr && when_.load() >= level ? recorder() : nullptr;
}

void History::Record(const Event& event, Context context, const std::string& metadata) {
  const std::lock_guard lock(mutex_);
  RethrowIfAny(Insert(event, context, metadata));
}

void History::Allocated(const Event& event, Context context, const std::string& metadata) {
  const std::lock_guard lock(mutex_);
  const std::exception_ptr error = Insert(event, context, metadata);
  if (context != nullptr) live_[event.address] = std::move(context);
  RethrowIfAny(error);
}

void History::Freed(Event event, Context context, const std::string& metadata) {
  const std::lock_guard lock(mutex_);
  const auto live = live_.find(event.address);
  if (live != live_.end()) {
    if (context == nullptr) context = std::move(live->second);
    live_.erase(live);
  }
  // Ours are free for the pool at once: what protects the bytes is the pool's to know.
  std::exception_ptr error;
  for (const Action action : {Action::FREE_REQUESTED, Action::FREE_COMPLETED}) {
    event.action = action;
    const std::exception_ptr another = Insert(event, context, metadata);
    if (error == nullptr) error = another;
  }
  RethrowIfAny(error);
}

// pre: mutex_ is held.
std::exception_ptr History::Insert(const Event& event, const Context& context,
                                   const std::string& metadata) {
  if ((!enabled_ && trackers_.empty()) || skipped_.contains(event.action)) return nullptr;
  const TraceEntry entry(event.action, event.device, event.address, event.size,
                         reinterpret_cast<void*>(event.stream),
                         {event.pool.first, event.pool.second}, c10::getApproximateTime(),
                         when_.load() >= When::ALLOC ? context : nullptr,
                         compile_contexts.empty() ? "N/A" : compile_contexts.back(), metadata);
  if (enabled_ && max_entries_ > 0) {
    std::deque<TraceEntry>& entries = entries_[event.device];
    entries.push_back(entry);
    if (entries.size() > max_entries_) entries.pop_front();
  }
  std::exception_ptr error;
  for (const Tracker& tracker : trackers_) {
    try {
      tracker(entry);
    } catch (...) {
      if (error == nullptr) error = std::current_exception();
    }
  }
  return error;
}

History::Context History::ContextOf(Address address) const {
  const std::lock_guard lock(mutex_);
  const auto live = live_.find(address);
  return live == live_.end() ? nullptr : live->second;
}

void History::PushCompileContext(const std::string& context) {
  compile_contexts.push_back(context);
}

void History::PopCompileContext() {
  if (!compile_contexts.empty()) compile_contexts.pop_back();
}

void History::MergeInto(std::vector<std::vector<TraceEntry>>& device_traces) {
  const std::lock_guard lock(mutex_);
  const auto to_nanoseconds = clock_.makeConverter();
  for (const auto& [device, entries] : entries_) {
    const auto index = static_cast<size_t>(device);
    if (index >= device_traces.size()) device_traces.resize(index + 1);
    std::vector<TraceEntry>& merged = device_traces[index];
    const auto bases = static_cast<std::ptrdiff_t>(merged.size());
    for (TraceEntry entry : entries) {
      entry.time_.t_ = to_nanoseconds(entry.time_.approx_t_) / 1000;  // as the base's: microseconds
      merged.push_back(std::move(entry));
    }
    std::inplace_merge(
        merged.begin(), merged.begin() + bases, merged.end(),
        [](const TraceEntry& a, const TraceEntry& b) { return a.time_.t_ < b.time_.t_; });
    if (merged.size() > max_entries_) {
      merged.erase(merged.begin(), merged.end() - static_cast<std::ptrdiff_t>(max_entries_));
    }
  }
}

}  // namespace cgp
