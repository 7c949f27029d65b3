#include "torch/observe/history.h"

#include <algorithm>

#include "torch/errors.h"

namespace cgp {

History& History::Get() {
  static auto* const history = new History;  // never destroyed, as the pools
  return *history;
}

void History::Configure(bool enabled, c10::CachingDeviceAllocator::CreateContextFn recorder,
                        size_t max_entries, When when, bool clear,
                        const std::vector<std::string>& skip_actions,
                        const std::function<void()>& configure) {
  std::set<Action> skipped;
  for (const std::string& action : skip_actions) {
    skipped.insert(c10::CachingDeviceAllocator::parseTraceEntryAction(action));
  }
  configure();
  const std::lock_guard lock(mutex_);
  recorder_.store(enabled ? recorder : nullptr);
  when_.store(enabled ? when : When::NEVER);
  max_entries_ = enabled ? max_entries : 0;
  skipped_ = std::move(skipped);
  if (!enabled || clear) entries_.clear();
  for (auto& [device, entries] : entries_) {
    while (entries.size() > max_entries_) entries.pop_front();
  }
  if (!enabled) live_.clear();
  Gate::Set(Gate::kHistory, enabled || !trackers_->empty());
}

void History::AttachTracker(Tracker tracker, const std::function<void()>& attach) {
  const Telling left_meanwhile(*this);
  const std::lock_guard telling(telling_mutex_);  // no other thread attaches one meanwhile
  auto more = std::make_shared<Trackers>(*trackers_);
  more->push_back(std::move(tracker));
  attach();
  const std::lock_guard lock(mutex_);
  trackers_ = std::move(more);
  Gate::Set(Gate::kHistory, true);
}

History::Context History::Gather(When level) const {
  const auto recorder = recorder_.load();
  return recorder != nullptr && when_.load() >= level ? recorder() : nullptr;
}

void History::Record(Event event, Context context, const std::string& metadata) {
  std::deque<TraceEntry> told;
  {
    const std::lock_guard lock(mutex_);
    if (event.action == Action::FREE_REQUESTED) {
      const auto live = live_.extract(event.address);
      if (live && context == nullptr) context = live.mapped();
      Insert(event, context, metadata, told);
      // The pool has our blocks back at once: it knows itself what protects the bytes.
      event.action = Action::FREE_COMPLETED;
    }
    Insert(event, context, metadata, told);
    if (event.action == Action::ALLOC && context != nullptr) {
      live_[event.address] = std::move(context);
    }
  }
  if (told.empty()) return;
  const Telling left_meanwhile(*this);
  const std::lock_guard telling(telling_mutex_);
  TellMappings();  // which came before
  for (const TraceEntry& entry : told) Tell(entry);
}

void History::Mapped(int device, bool mapped, Address address, uint64_t bytes) noexcept {
  History& history = Get();
  if (!history.active()) return;
  const Event event{mapped ? Action::SEGMENT_MAP : Action::SEGMENT_UNMAP,
                    static_cast<c10::DeviceIndex>(device),
                    address,
                    bytes,
                    Purpose::now.second,
                    Purpose::now.first};
  // A mapping stands even if there is no memory to record it.
  WithWarnings("the history of allocations", [&] {
    const std::lock_guard lock(history.mutex_);
    // No stack: gathering one may wait for the GIL.
    history.Insert(event, nullptr, "", history.mappings_);
  });
}

void History::Insert(const Event& event, const Context& context, const std::string& metadata,
                     std::deque<TraceEntry>& told) {
  if (skipped_.contains(event.action)) return;
  TraceEntry entry(event.action, event.device, event.address, event.size,
                   reinterpret_cast<void*>(event.stream), {event.pool.first, event.pool.second},
                   c10::getApproximateTime(), when_.load() >= When::ALLOC ? context : nullptr,
                   "N/A", metadata);
  if (max_entries_ > 0) {
    std::deque<TraceEntry>& entries = entries_[event.device];
    entries.push_back(entry);
    if (entries.size() > max_entries_) entries.pop_front();
  }
  if (!trackers_->empty()) told.push_back(std::move(entry));
}

void History::Tell(const TraceEntry& entry) const {
  std::shared_ptr<const Trackers> trackers;
  {
    const std::lock_guard lock(mutex_);
    trackers = trackers_;
  }
  for (const Tracker& tracker : *trackers) {
    WithWarnings("a tracker of allocations", [&] { tracker(entry); });
  }
}

// Nobody waits here: a thread with the base's lock calls this too, and a tracker may want that
// lock.
void History::TellMappings() noexcept {
  std::unique_lock lock(mutex_);
  // Threads that came meanwhile left their mappings to this one.
  while (!mappings_.empty()) {
    const std::unique_lock telling(telling_mutex_, std::try_to_lock);
    if (!telling.owns_lock()) return;
    const TraceEntry mapping = std::move(mappings_.front());
    mappings_.pop_front();
    lock.unlock();
    Tell(mapping);
    lock.lock();
  }
}

History::Context History::ContextOf(Address address) const {
  const std::lock_guard lock(mutex_);
  const auto live = live_.find(address);
  return live == live_.end() ? nullptr : live->second;
}

void History::MergeInto(std::vector<std::vector<TraceEntry>>& device_traces) {
  const std::lock_guard lock(mutex_);
  const auto to_nanoseconds = clock_.makeConverter();
  for (const auto& [device, entries] : entries_) {
    const auto index = static_cast<size_t>(device);
    if (index >= device_traces.size()) device_traces.resize(index + 1);
    std::vector<TraceEntry>& merged = device_traces[index];
    for (TraceEntry entry : entries) {
      entry.time_.t_ = to_nanoseconds(entry.time_.approx_t_) / 1000;  // as the base's: microseconds
      merged.push_back(std::move(entry));
    }
    std::ranges::stable_sort(merged, {}, [](const TraceEntry& entry) { return entry.time_.t_; });
    if (merged.size() > max_entries_) {
      merged.erase(merged.begin(), merged.end() - static_cast<std::ptrdiff_t>(max_entries_));
    }
  }
}

}  // namespace cgp
