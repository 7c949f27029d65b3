#include "testing/fuzz_session.h"

#include <algorithm>
#include <new>
#include <thread>
#include <utility>

#include "core/base/error.h"
#include "testing/pool_of.h"

namespace cgp {
using enum Step::Kind;

std::string ToString(const FuzzSetup& setup) {
  return Text("FuzzSetup{.granularity_bytes = ", setup.granularity_bytes,
              ", .page_bytes = ", setup.page_bytes,
              ", .physical_limit_bytes = ", setup.physical_limit_bytes, std::boolalpha,
              ", .map_memory = ", setup.map_memory, ", .inspect_every = ", setup.inspect_every,
              ", .one_pool = ", setup.one_pool, ", .tidy_end = ", setup.tidy_end,
              ", .fail_each = ", setup.fail_each, ", .streams = ", setup.streams,
              ", .seed = ", setup.seed, "U, .forked = ", setup.forked,
              ", .threads = ", setup.threads, "}");
}

namespace {

// Empty if the judge has none.
template <typename Judging>
std::string ComplaintOf(const Judging& judge) {
  try {
    judge();
    return {};
  } catch (const Complaint& complaint) {
    return complaint.text;
  }
}

uint64_t BytesOf(const std::vector<PhysicalPiece>& pieces) {
  uint64_t bytes = 0;
  for (const PhysicalPiece& piece : pieces) bytes += piece.length_bytes;
  return bytes;
}

}  // namespace

FuzzSession::FuzzSession(const FuzzSetup& setup, World* shared, uint64_t number)
    : setup_(setup),
      number_(number),
      own_world_(shared ? nullptr
                        : std::make_unique<World>(
                              HostDriverOptions{.granularity = setup.granularity_bytes,
                                                .physical_limit_bytes = setup.physical_limit_bytes,
                                                .map_memory = setup.map_memory},
                              PoolOptions{.page_bytes = setup.page_bytes})),
      world_(shared ? *shared : *own_world_),
      model_(watch_, dag_, setup.page_bytes),
      random_(setup.seed) {}

std::string FuzzSession::Run(const Step& step) {
  ++steps_;
  last_failed_ = false;
  return ComplaintOf([&] {
    Do(step);
    if (setup_.streams > 0) CompareFrontiers();
    if (own_world_) CompareStats();
    if (own_world_ && steps_ % setup_.inspect_every == 0) Inspect();
    JudgeDriver();
  });
}

void FuzzSession::Do(const Step& step) {
  const PoolId id = IdOf(step.pool);
  const Step::Kind kind = step.kind;
  if (setup_.streams > 0 && step.stream >= setup_.streams &&
      (kind != kUse || step.stream > setup_.streams)) {
    return;
  }
  if (kind == kAllocate) return Allocate(step);
  if (kind == kFree) return Free(step.item);
  if (kind == kFreeInside) return FreeInside(step.item);
  if (kind == kUse) return RecordUse(step);
  if (kind == kBeginCapture) return Begin(id, ScopeKind::kCapture, step.amount > 0);
  if (kind == kBeginEager) return Begin(id, ScopeKind::kEager, step.amount > 0);
  if (kind == kEnd) return End(id);
  if (kind == kReplay) {
    Replay(id, StreamId{step.stream}, step.item);
    return;
  }
  if (kind >= kBeginApart && kind <= kDropCapture) return own_world_ ? DoLease(step) : void();
  if (kind == kTrim) return Trim();
  if (kind == kCheckpoint) return Checkpoint(id, step.item);
  if (kind == kRestore) return Restore(id, step.item);
  if (kind == kMend) return Mend();
  if (kind == kInspect) return Inspect();
  if (kind == kRetain) {
    if (StaysForRemains(id)) remained_.insert(id);
    Mirror(
        true, [&] { set_.Retain(id); }, [&] { model_.Retain(id); });
  } else if (kind == kRelease) {
    Mirror(
        model_.UseCount(id) > 0, [&] { set_.Release(id); }, [&] { model_.Release(id); });
  } else if (kind == kPeer) {
    Mirror(
        true, [&] { set_.EnablePeer(static_cast<int>(step.item)); }, [] {});
    peers_settled_ = !last_failed_;
    ComparePeers();
  } else if (kind == kFreeWild) {
    if (model_.LiveAt(step.amount) == nullptr) RefusesAddress(step.amount);
  } else if (kind == kProgress) {
    watch_.Progress(StreamOf(step.stream, id), step.amount);
    if (setup_.streams > 0) watch_.Progress(StreamOf(setup_.streams, id), step.amount);
    asked_.clear();
  } else if (kind == kFail) {
    fault_ = step.fault;
    faulty_.Arm(fault_);
    armed_ = true;
  } else if (kind == kFailAllocation) {
    allocation_fault_ = step.fault;
  } else if (setup_.streams > 0 && captures_.contains(graph_pool_)) {
    DoInGraph(step);
  }
}

void FuzzSession::JudgeDriver() const {
  if (foreign_) Complain("a kernel found foreign data in block b", *foreign_);
  for (const std::string& violation : watch_.violations()) {
    // Where an undo failed, a mapping may stand for good; its addresses cannot be given back then.
    if (leaky_ && violation.find("mappings are in") != std::string::npos) continue;
    Complain("driver.h is broken: " + violation);
  }
}

FuzzSession::Result FuzzSession::Call(const Action& call, std::optional<FaultKind> kind,
                                      const Describe& describe) {
  Result result;
  const auto no_heap = std::exchange(allocation_fault_, std::nullopt);
  const uint64_t failures_before = faulty_.failures();
  try {
    std::optional<AllocationFault> failing;
    if (no_heap) failing.emplace(no_heap->call_number, no_heap->for_good);
    if (setup_.fail_each && !no_heap && !armed_ && kind) {
      describe ? world_.FailEach(*kind, call, describe) : world_.FailEach(*kind, call);
    } else {
      call();
    }
  } catch (const std::exception& error) {
    const auto* const of_heap = dynamic_cast<const std::bad_alloc*>(&error);
    result.text = error.what();
    result.outcome = dynamic_cast<const UsageError*>(&error)         ? Outcome::kUsageError
                     : dynamic_cast<const OutOfMemoryError*>(&error) ? Outcome::kOutOfMemory
                     : dynamic_cast<const DriverError*>(&error)      ? Outcome::kDriverError
                     : of_heap && no_heap                            ? Outcome::kNoHeap
                                                                     : Outcome::kBug;
  }
  const std::vector<DriverCall> failed_calls = faulty_.failed();
  const uint64_t failures = failed_calls.size() - failures_before;
  result.fault_fired = armed_ && failures > 0;
  last_failed_ = result.outcome != Outcome::kDone;
  driver_failures_ += failures;
  // What had to give something back and failed.
  for (uint64_t i = failures_before; i < failed_calls.size(); ++i) {
    leaky_ |= failed_calls[i] == DriverCall::kUnmap || failed_calls[i] == DriverCall::kRelease ||
              failed_calls[i] == DriverCall::kFreeAddresses;
  }
  if (result.fault_fired && !fault_.for_good) {
    armed_ = false;
    faulty_.Disarm();
  }
  return result;
}

World::Books FuzzSession::TakeBooks(bool allowed) const {
  return armed_ || allocation_fault_ || !allowed ? world_.TakeBooks() : World::Books{};
}

void FuzzSession::JudgeFailure(const Result& result, bool allowed, const World::Books& before) {
  if (result.outcome == Outcome::kBug) Complain("unexpected exception: " + result.text);
  if (result.outcome == Outcome::kDone) {
    if (!allowed) Complain("bad input was taken");
    if (result.fault_fired) Complain("a driver error was swallowed");
    return;
  }
  if (result.outcome == Outcome::kUsageError && allowed) Complain("refused: " + result.text);
  if (result.outcome != Outcome::kUsageError && result.outcome != Outcome::kNoHeap &&
      !result.fault_fired) {
    Complain("failed without a cause: " + result.text);
  }
  if (result.outcome == Outcome::kNoHeap) set_.Check();
  const World::Books after = world_.TakeBooks();
  const bool same_memory =
      before.driver == after.driver && before.peak_reserved_bytes == after.peak_reserved_bytes;
  if (before.set == after.set && (leaky_ || same_memory)) return;
  Complain("a call that failed (", result.text, ") changed the state from\n", ToString(before),
           "to\n", ToString(after));
}

void FuzzSession::Mirror(bool allowed, const Action& call, const Action& then) {
  const World::Books before = TakeBooks(allowed);
  const Result result = Call(call, SomeFault());
  if (result.outcome == Outcome::kDone && allowed) then();
  JudgeFailure(result, allowed, before);
}

void FuzzSession::MirrorOf(uint64_t label, const Action& call, const Action& then) {
  if (!IsOthers(label)) return Mirror(true, call, then);
  std::string complaint;
  std::thread([&] { complaint = ComplaintOf([&] { Mirror(true, call, then); }); }).join();
  Judge(complaint);
}

void FuzzSession::Begin(PoolId id, ScopeKind kind, bool capturing) {
  const bool may_mark = !capturing && watch_.MayQuiesce();
  if (StaysForRemains(id)) remained_.insert(id);
  return MirrorMoving(
      id, !model_.OpenScope(id).has_value(), [&] { set_.BeginScope(id, kind, capturing); },
      [&] {
        asked_.insert(id);
        asked_for_[id].sizes = asked_for_[id].bytes = 0;
        model_.BeginScope(id, kind, may_mark);
        watch_.set_capturing(model_.AnyCaptureOpen());
        if (kind == ScopeKind::kCapture) BeginCapture(id);
      });
}

void FuzzSession::End(PoolId id) {
  // As torch does it: the capture ends first, then the scope.
  if (const auto captures = captures_.extract(id)) {
    for (const CaptureId capture : captures.mapped()) dag_.End(capture);
    if (setup_.streams > 0) EndGraph();
  }
  return Mirror(
      model_.OpenScope(id).has_value(), [&] { set_.EndScope(id); },
      [&] {
        model_.EndScope(id, watch_.MayQuiesce());
        watch_.set_capturing(model_.AnyCaptureOpen());
        if (PoolModel::IsLoan(id)) Follow(PoolModel::LenderOf(id));
      });
}

void FuzzSession::Allocate(const Step& step) {
  if (step.item == 0 || addresses_.contains(step.item)) return;
  const PoolId id = IdOf(step.pool);
  if (CaptureIsOver(id)) return;
  const StreamId stream = StreamOf(step.stream, id);
  // A loan that was withdrawn begins anew, with what the lender has free then, and marks the device.
  const bool is_withdrawn = model_.IsWithdrawn(id);
  const bool allowed =
      model_.OpenScope(id).has_value() && step.amount > 0 && (!is_withdrawn || watch_.MayQuiesce());
  const bool renews = allowed && is_withdrawn;
  std::optional<CaptureId> in;  // else the pool asks the driver
  if (setup_.streams > 0) {
    if (!allowed || (!dag_.IsCapturing(stream) && !Join(stream))) return;
    in = dag_.IsCaptured(stream) ? dag_.At(stream).capture : kNoCapture;
    for (const StreamId user : std::exchange(unseen_, {})) model_.See(id, user);
    model_.See(id, stream);
  }
  const bool is_loan = PoolModel::IsLoan(id);
  Frontier frontier;
  host_.Capture(stream, &frontier);
  if (is_loan && frontier.held) return;
  // The model knows no handles: a whole page in one of several can be mapped only with the others.
  // Where there is such a handle, the block may take as many pages as in an empty pool.
  const bool large = host_.usage().physical_bytes != host_.usage().handles * setup_.page_bytes;
  const auto need_beside = [&](const Ring& kept) {
    PoolModel::Need need = model_.NeedOf(id, step.amount, stream, kept);
    if (large) {
      need.ideal = (step.amount - 1) / setup_.page_bytes + 1;
      need.whole_pages = 0;
    }
    return need;
  };
  const Ring ring = allowed ? set_.Snapshot(id).ring : Ring();
  const PoolModel::Need need = allowed ? need_beside({}) : PoolModel::Need();
  uint64_t most_new = need.most_new();
  if (!ring.empty()) most_new = std::max(most_new, need_beside(ring).most_new());
  const uint64_t pages_left = is_loan ? 0 : PagesLeft();
  const bool may_run_out = allowed && (renews || need.least_new() > pages_left);
  const World::Books before = TakeBooks(allowed && !may_run_out);
  const bool unmaps = allowed && model_.OpenScope(id) != ScopeKind::kCapture &&
                      (renews || set_.Stats(id).page_mappings > 512);
  Block block;
  // Where memory runs out as it is, be it for pages beyond need, it is an undo that would be made
  // to fail. A call that unmaps what is stale has done so also where it fails, so that it is not
  // failed in each way.
  // The ring may want to have what a whole scope asked for.
  const Asked& asked = asked_for_[id];
  const uint64_t of_ring = (asked.most_bytes + 2 * asked.largest) / setup_.page_bytes + 1;
  const uint64_t most = std::max(most_new, need.ideal + of_ring);
  std::optional<FaultKind> kind = most > pages_left ? FaultKind::kAllocation : SomeFault();
  if (unmaps) kind.reset();
  const Action call = [&] { block = set_.Allocate(id, step.amount, stream, in); };
  Result result = Call(call, kind);
  if (renews && (result.outcome == Outcome::kNoHeap || result.fault_fired)) {
    Mend();
    result = Call(call, {});
  }
  const PoolSnapshot now = allowed ? set_.Snapshot(id) : PoolSnapshot();
  // A capture's first allocation gives the ring all that is open of its range, also where the ring
  // was dissolved before.
  if (!now.ring.empty()) most_new = std::max(most_new, need_beside(now.ring).most_new());
  if (renews) {
    model_.Renew(id);
    Follow(PoolModel::LenderOf(id));
  }
  if (allowed) model_.Ask(id, stream);
  if (result.outcome == Outcome::kOutOfMemory && may_run_out) {
    result.fault_fired = true;  // the limit is as good a cause
  }
  if (result.outcome == Outcome::kDone) {
    // Pages of its own, and pages beyond need, a block is placed without where the driver has none.
    // Mappings that an eager scope could not unmap are unmapped later.
    const bool given_up = (need.apart || need.beyond > 0) && fault_.status != DriverStatus::kFailed;
    if (given_up || unmaps) result.fault_fired = false;
    if (allowed) Placed(step, block, need, most_new, ring, now);
  }
  // An eager scope unmaps what is stale first, whether or not there is a place for the block then.
  return JudgeFailure(result, allowed, unmaps ? world_.TakeBooks() : before);
}

void FuzzSession::Placed(const Step& step, const Block& block, const PoolModel::Need& need,
                         uint64_t most_new, const Ring& ring_before, const PoolSnapshot& now) {
  const PoolId id = IdOf(step.pool);
  const StreamId stream = StreamOf(step.stream, id);
  const uint64_t rounded = Granules::FromBytesRoundedUp(step.amount).bytes();
  if (block.bytes != rounded || block.requested_bytes != step.amount || block.stream != stream) {
    Complain("block of ", block.bytes, " for ", block.requested_bytes, " bytes on stream ",
             static_cast<uint64_t>(block.stream), ", expected ", rounded);
  }
  const uint64_t pages_before = model_.Pages(id);
  const std::vector<PhysicalPiece> pieces = set_.Pieces(block.address);
  const uint64_t whole_pages = model_.WholePagesOf(id, pieces, stream);
  // The model before the books, since it says why bytes may not be taken.
  const uint64_t pages = PagesIn(now);
  Judge(model_.Place(step.item, id, block, pieces, pages));
  JudgePieces(id, block, pieces);
  const uint64_t new_pages = pages - pages_before;
  if (new_pages > 0 && rounded < setup_.page_bytes) ++growths_judged_;
  Asked& asked = asked_for_[id];
  asked.sizes = (asked.sizes + rounded) * 0x9E3779B97F4A7C15;
  asked.bytes += rounded;
  asked.most_bytes = std::max(asked.most_bytes, asked.bytes);
  asked.largest = std::max(asked.largest, rounded);
  const bool comes_again = !known_sizes_.emplace(id, asked.sizes).second;
  // What comes again while its like lives may lie in the ring, which grows then: to have room for
  // what one scope asks for, and for a block.
  const Ring& ring = now.ring;
  // One that a range has no more room for is no more, and another one begins.
  const bool goes_on = std::ranges::any_of(ring_before, [&](const PhysicalPiece& before) {
    return std::ranges::any_of(ring, [&](const auto& piece) { return piece.page == before.page; });
  });
  const uint64_t before = goes_on ? BytesOf(ring_before) : 0;
  const uint64_t grown = BytesOf(ring) + rounded;
  if (comes_again && grown > before) {
    const uint64_t wanted = rounded + asked.most_bytes + asked.largest;
    const uint64_t own = (wanted + setup_.page_bytes - 1) / setup_.page_bytes;
    most_new = std::max(most_new, std::min(own, (grown - before) / setup_.page_bytes));
  }
  if (new_pages > most_new && !remained_.contains(id)) {
    Complain("asked the driver for ", new_pages, " pages where ", most_new, " do");
  }
  // One more saves mappings; two would not. (What comes behind the same sizes as before lies where
  // it lay then, whatever that takes now.) A page amid a handle of several is no partial that could
  // hold the remainder, whatever is free of it: where there are such handles, a page for the
  // remainder is always right. And a page may be whole, rather than a partial, only since work has
  // gone on that the pool has not asked about.
  const bool one_page_handles =
      host_.usage().handles * setup_.page_bytes == host_.usage().physical_bytes;
  const uint64_t ideal =
      one_page_handles ? need.ideal : (rounded + setup_.page_bytes - 1) / setup_.page_bytes;
  const bool judged =
      !comes_again && model_.OpenScope(id) == ScopeKind::kEager && asked_.contains(id);
  if (judged && whole_pages > ideal + 1) {
    Complain("took ", whole_pages, " whole pages where ", ideal, " do");
  }
  addresses_[step.item] = block.address;
  live_labels_.push_back(step.item);
  watch_.MarkUsed();
  const PoolModel::LiveBlock& live = *LiveOf(step.item);
  if (setup_.streams > 0) {
    tensors_[step.item] = {.block = block,
                           .graph = graphs_.size() - 1,
                           .word = random_(),
                           .capture = dag_.At(stream).capture,
                           .behind = dag_.At(stream).nodes};
  } else if (live.eager) {
    Submit(live, stream, /*writes=*/true, {});
  } else {
    dag_.Launch(stream);
    Fill(live);
  }
}

const PoolModel::LiveBlock* FuzzSession::LiveOf(uint64_t label) const {
  const auto it = addresses_.find(label);
  const PoolModel::LiveBlock* const live =
      it == addresses_.end() ? nullptr : model_.LiveAt(it->second);
  return live == nullptr || live->label != label ? nullptr : live;
}

void FuzzSession::Free(uint64_t label) {
  const auto it = addresses_.find(label);
  if (it == addresses_.end()) return;
  const Address address = it->second;
  if (LiveOf(label) == nullptr) {
    // If another block starts there by now, that would be its free.
    if (model_.LiveAt(address) == nullptr) RefusesAddress(address);
    return;
  }
  const PoolModel::LiveBlock live = *model_.LiveAt(address);
  if (CaptureIsOver(live.pool)) return;
  Read(live);
  CaptureId in = kNoCapture;
  if (setup_.streams > 0) {
    if (!ReadyToFree(label)) return;
    in = tensors_.extract(label).mapped().capture;
  }
  return MirrorOf(
      label, [&] { set_.Free(address); },
      [&] {
        model_.Free(address, in, !IsOthers(label));
        std::erase(live_labels_, label);
        freed_labels_.push_back(label);
      });
}

// pre: no live block starts there.
void FuzzSession::RefusesAddress(Address address) {
  const auto nothing = [] {};
  Mirror(
      false, [&] { set_.Free(address); }, nothing);
  Mirror(
      false, [&] { set_.RecordUse(address, StreamId{0}); }, nothing);
  const PoolModel::LiveBlock* holder = model_.Holding(address);
  if (set_.Find(address).has_value() != (holder != nullptr))
    Complain("Find() finds a wild address");
  if (PoolOf(set_, address)) Complain("PoolOf() takes a wild address");
}

void FuzzSession::FreeInside(uint64_t label) {
  const PoolModel::LiveBlock* const live = LiveOf(label);
  if (live == nullptr) return;
  for (const uint64_t inside : {uint64_t{1}, uint64_t{512}, live->block.bytes - 1}) {
    if (inside >= live->block.bytes) continue;
    RefusesAddress(live->block.address + inside);
  }
}

void FuzzSession::RecordUse(const Step& step) {
  const PoolModel::LiveBlock* const live = LiveOf(step.item);
  if (live == nullptr || CaptureIsOver(live->pool)) return;
  const Address address = live->block.address;
  const StreamId stream = StreamOf(step.stream, live->pool);
  const bool by_another = stream != live->block.stream;
  if (setup_.streams > 0 && by_another && model_.OpenScope(live->pool)) {
    if (IsOthers(step.item)) unseen_.push_back(stream);
    if (!IsOthers(step.item)) model_.See(live->pool, stream);
  }
  return MirrorOf(
      step.item, [&] { set_.RecordUse(address, stream); },
      [&] {
        model_.RecordUse(address, stream);
        if (setup_.streams > 0) {
          if (by_another && !dag_.IsCapturing(stream)) watch_.Submit(stream);
          return;
        }
        // Of its own stream's use of a captured block a pool is not told: that is over when a graph
        // runs again.
        const auto filled = filled_by_.find(step.item);
        const bool told = live->eager || by_another;
        if (model_.OpenScope(live->pool) == ScopeKind::kCapture) {
          dag_.Launch(stream);
        } else if (!told || filled == filled_by_.end()) {
          watch_.Submit(stream);
        } else {
          Submit(*live, stream, /*writes=*/false, filled->second);
        }
      });
}

void FuzzSession::RunLast(const Steps& steps) {
  for (const Step& step : steps) {
    const std::string complaint = Run(step);
    if (!complaint.empty()) Complain(complaint, " (at the end, ", ToString(step), ")");
  }
}

std::string FuzzSession::Finish() {
  return ComplaintOf([this] { Close(); });
}

void FuzzSession::Close() {
  Steps ends = {{kMend}};
  for (const PoolId id : model_.ids()) {
    if (model_.OpenScope(id)) ends.push_back({.kind = kEnd, .pool = id.first});
  }
  RunLast(ends);
  Execute();
  Steps rest;
  if (setup_.tidy_end) {
    for (const uint64_t label : live_labels_) rest.push_back({.kind = kFree, .item = label});
    for (const PoolId id : model_.ids()) {
      rest.insert(rest.end(), static_cast<size_t>(model_.UseCount(id)),
                  {.kind = kRelease, .pool = id.first});
    }
    if (own_world_) rest.push_back({kTrim});
  }
  if (own_world_) rest.push_back({kInspect});
  RunLast(rest);
  if (!own_world_) return;
  if (setup_.tidy_end && !set_.ids().empty())
    Complain("pools are left after everything was released");
  watch_.Quiesce();
  world_.set.reset();
  JudgeDriver();
  if (leaky_ && !setup_.tidy_end) return;
  const HostUsage left = host_.usage();
  if (left.handles + left.mappings + left.reservations + watch_.events() != 0) {
    Complain("left behind: ", left.handles, " handles, ", left.mappings, " mappings, ",
             left.reservations, " reservations, ", watch_.events(), " events");
  }
}

}  // namespace cgp
