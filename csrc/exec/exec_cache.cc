#include "exec/exec_cache.h"

#include <algorithm>
#include <thread>

#include "core/base/error.h"

namespace cgp {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::microseconds kNap{20};
constexpr Clock::time_point kNotWaiting = Clock::time_point::max();

}  // namespace

ExecCache::~ExecCache() {
  for (auto& [number, exec] : execs_) graphs_->Destroy(exec.handle);
}

GraphNumber ExecCache::Add(Graph graph) {
  const GraphKind kind = graphs_->KindOf(graph);
  const std::lock_guard lock(mutex_);
  const bool shares = kind.alone.empty();
  const auto known = shares ? groups_.find(kind.key) : groups_.end();
  const GroupNumber group = known != groups_.end()
                                ? known->second
                                : table_.AddGroup(shares ? GroupKind::kShared : GroupKind::kAlone);
  if (shares) groups_.try_emplace(kind.key, group);
  const GraphNumber number = table_.Add(group, kind.exec_bytes);
  try {
    members_[number] = {.graph = graph, .alone = kind.alone};
    if (table_.MayHaveFirst(number)) Make(number);
  } catch (...) {
    RemoveLocked(number);
    throw;
  }
  return number;
}

void ExecCache::Remove(GraphNumber graph) {
  const std::lock_guard lock(mutex_);
  RemoveLocked(graph);
}

GraphExec ExecCache::Lease(GraphNumber graph, StreamId stream) {
  std::unique_lock lock(mutex_);
  Exec& exec = Hold(graph, stream, lock);
  WaitFor(members_.at(graph).last_run, stream);
  const ExecNumber number = table_.HolderOf(graph).value();
  MarkEndOfLast(number);
  auto run = std::make_shared<Run>(events_, graph, Launch{.stream = stream, .stream_lasts = true},
                                   launches_);
  // A captured launch does not run now, and must not be taken for one that does.
  const auto is_elsewhere = [&](const std::shared_ptr<Run>& before) {
    return before && !before->ComesBefore(stream);
  };
  run->captured =
      (is_elsewhere(exec.last_run) || is_elsewhere(members_.at(graph).last_run)) && IsHeld(stream);
  exec.leases.push_back(std::move(run));
  table_.Launched(number);
  launched_last_ = number;
  return exec.handle;
}

void ExecCache::Return(GraphNumber graph, const Launch& launch) {
  const std::lock_guard lock(mutex_);
  Exec& exec = execs_.at(table_.HolderOf(graph).value());
  CGP_CHECK(!exec.leases.empty());
  // Several threads may return leases in any order. Leases of one stream are alike.
  const auto of_stream = std::ranges::find(exec.leases, launch.stream,
                                           [](const auto& one) { return one->launch.stream; });
  const auto lease = of_stream != exec.leases.end() ? of_stream : exec.leases.begin();
  std::shared_ptr<Run> run = std::move(*lease);
  exec.leases.erase(lease);
  if (!run->captured) NoteLaunch(exec, std::move(run), launch);
}

void ExecCache::Prepare(GraphNumber graph, const Launch& launch) {
  std::unique_lock lock(mutex_);
  MakeReady(Hold(graph, launch.stream, lock), graph, launch);
}

void ExecCache::DropIdle() {
  const std::lock_guard lock(mutex_);
  for (auto& [graph, member] : members_) {
    const std::optional<ExecNumber> holder = table_.HolderOf(graph);
    if (holder && execs_.at(*holder).leases.empty()) member.dropped = true;
  }
  std::vector<ExecNumber> idle;
  for (const auto& [number, exec] : execs_) {
    if (exec.leases.empty()) idle.push_back(number);
  }
  for (const ExecNumber number : idle) {
    RememberRun(number);
    table_.Destroyed(number);
    DestroyHandle(number);
  }
}

void ExecCache::MakeDropped(const Launch& launch) {
  const std::lock_guard lock(mutex_);
  try {
    for (auto& [graph, member] : members_) {
      if (!std::exchange(member.dropped, false) || !table_.MayHaveOneMore(graph)) continue;
      if (Exec* const exec = Make(graph)) MakeReady(*exec, graph, launch);
    }
  } catch (const DriverError& error) {
    if (error.status() != DriverStatus::kOutOfMemory) throw;
  }
}

ExecCache::Stats ExecCache::stats() const {
  const std::lock_guard lock(mutex_);
  Stats stats{.execs = execs_.size(), .instantiations = instantiations_, .updates = updates_};
  for (const auto& [number, member] : members_) {
    if (!member.alone.empty()) ++stats.alone[member.alone];
  }
  return stats;
}

void ExecCache::RemoveLocked(GraphNumber graph) {
  const GroupNumber group = table_.GroupOf(graph);
  HasLeft(group, table_.Remove(graph));
  members_.erase(graph);
}

void ExecCache::HasLeft(GroupNumber group, std::optional<ExecNumber> useless) {
  if (useless) DestroyHandle(*useless);
  if (table_.Contains(group)) return;
  std::erase_if(groups_, [&](const auto& entry) { return entry.second == group; });
}

ExecCache::Exec& ExecCache::Hold(GraphNumber graph, StreamId stream,
                                 std::unique_lock<std::mutex>& lock) {
  const uint64_t launches = launches_;
  const ExecTable::Conditions conditions = {
      .in_use = [&](ExecNumber number) { return InUse(execs_.at(number), stream); },
      .running = [&](ExecNumber number) { return Running(execs_.at(number).last_run); }};
  Clock::time_point deadline = kNotWaiting;
  for (;;) {
    const ExecTable::Plan plan = table_.PlanFor(graph, conditions);
    // Its last launch was made before this began, has not ended, and its end is marked.
    const auto is_worth_awaiting = [&](ExecNumber number) {
      Exec& exec = execs_.at(number);
      return Running(exec.last_run) && exec.last_run->number <= launches && exec.last_run->end;
    };
    if (std::ranges::any_of(plan.destroy, is_worth_awaiting)) {
      const Clock::time_point now = Clock::now();
      if (deadline == kNotWaiting) deadline = now + longest_wait_;
      if (now < deadline) {
        lock.unlock();
        std::this_thread::sleep_for(kNap);
        lock.lock();
        continue;
      }
    }
    for (const ExecNumber number : plan.destroy) {
      RememberRun(number);
      table_.Destroyed(number);
      DestroyHandle(number);
    }
    switch (plan.step) {
      case ExecTable::Step::kNone:
        table_.Used(*plan.exec);
        return execs_.at(*plan.exec);
      case ExecTable::Step::kMake:
        if (Exec* const exec = Make(graph)) return *exec;
        deadline = kNotWaiting;  // the next one to go is worth another wait
        break;
      case ExecTable::Step::kUpdate:
        if (Update(*plan.exec, graph)) return execs_.at(*plan.exec);
        break;
    }
  }
}

bool ExecCache::InUse(Exec& exec, StreamId stream) {
  if (!exec.leases.empty()) return true;
  return exec.last_run && exec.last_run->launch.stream != stream && Running(exec.last_run);
}

bool ExecCache::Running(std::shared_ptr<Run>& run) {
  if (!run) return false;
  MarkEnd(*run);
  if (!run->end) return true;
  try {
    if (!events_.EventDone(*run->end)) return true;
  } catch (const DriverError&) {
    run->Unmark();  // the next mark tells
    throw;
  }
  run.reset();
  return false;
}

void ExecCache::MarkEnd(Run& run, bool is_there) {
  if (run.end || !(is_there || run.launch.stream_lasts) || IsHeld(run.launch.stream)) return;
  run.end = events_.RecordEvent(run.launch.stream);
  // Another thread may have begun a capture there meanwhile. The mark may be a part of that then,
  // and no point in the stream's work, so it must not be queried.
  if (IsHeld(run.launch.stream)) run.Unmark();
}

void ExecCache::RememberRun(ExecNumber number) {
  const std::shared_ptr<Run>& run = execs_.at(number).last_run;
  if (!run) return;
  // It may have been updated, and not launched since.
  const auto member = members_.find(run->graph);
  if (member == members_.end() || table_.HolderOf(run->graph) != number) return;
  std::shared_ptr<Run>& known = member->second.last_run;
  if (known && known->number > run->number) return;
  MarkEnd(*run);
  known = run;
}

void ExecCache::WaitFor(std::shared_ptr<Run>& run, StreamId stream) {
  if (!run || run->ComesBefore(stream)) return;
  // Running() also guards against a mark that a capture has taken: waiting for that would draw the
  // stream into the capture.
  if (Running(run) && run->end && !IsHeld(stream)) events_.WaitEvent(stream, *run->end);
}

bool ExecCache::IsHeld(StreamId stream) {
  Frontier frontier;
  events_.Capture(stream, &frontier);
  return frontier.held;
}

void ExecCache::MarkEndOfLast(ExecNumber next) {
  // While each graph has its own, nobody will ask. A later mark would stand behind more work.
  if (!launched_last_ || *launched_last_ == next || table_.AllKeepTheirs()) return;
  const auto last = execs_.find(*launched_last_);
  if (last != execs_.end() && last->second.last_run) MarkEnd(*last->second.last_run);
}

void ExecCache::NoteLaunch(Exec& exec, std::shared_ptr<Run> run, const Launch& launch) {
  const uint64_t before = std::exchange(run->number, ++launches_);
  run->launch = launch;
  std::shared_ptr<Run> other = std::exchange(exec.last_run, std::move(run));
  // Of two leases at once, either may have been launched last: this end stands for both.
  if (other && other->number > before) WaitFor(other, launch.stream);
  // The stream may be gone when somebody wants to know.
  if (!launch.stream_lasts) MarkEnd(*exec.last_run, /*is_there=*/true);
}

ExecCache::Exec* ExecCache::Make(GraphNumber graph) {
  const std::optional<ExecNumber> holder = table_.HolderOf(graph);
  if (holder) RememberRun(*holder);
  GraphExec handle{};
  try {
    handle = graphs_->Instantiate(members_.at(graph).graph);
  } catch (const DriverError& error) {
    if (error.status() != DriverStatus::kOutOfMemory) throw;
    const bool may_do_with_less = table_.OutOfMemory(graph);
    if (!holder && !may_do_with_less) throw;
    if (!holder) return nullptr;
    table_.NotReplaced(*holder);
    return &execs_.at(*holder);
  }
  ++instantiations_;
  std::optional<ExecNumber> number;
  try {
    number = table_.Made(graph);
    return &(execs_[*number] = {.handle = handle});
  } catch (...) {
    if (number) table_.Destroyed(*number);
    graphs_->Destroy(handle);
    throw;
  }
}

void ExecCache::MakeReady(Exec& exec, GraphNumber graph, const Launch& launch) {
  if (IsHeld(launch.stream)) return;
  WaitFor(members_.at(graph).last_run, launch.stream);
  auto run = std::make_shared<Run>(events_, graph, launch, launches_);
  graphs_->Upload(exec.handle, launch.stream);
  NoteLaunch(exec, std::move(run), launch);
}

bool ExecCache::Update(ExecNumber number, GraphNumber graph) {
  RememberRun(number);
  bool updated = false;
  try {
    updated = graphs_->Update(execs_.at(number).handle, members_.at(graph).graph);
  } catch (...) {  // also where memory does not suffice for the error
    table_.Destroyed(number);
    DestroyHandle(number);
    throw;
  }
  if (updated) {
    ++updates_;
    table_.Updated(number, graph);
    return true;
  }
  const GroupNumber before = table_.GroupOf(graph);
  HasLeft(before, table_.SetApart(graph));
  return false;
}

void ExecCache::DestroyHandle(ExecNumber number) noexcept {
  graphs_->Destroy(execs_.at(number).handle);
  execs_.erase(number);
}

}  // namespace cgp
