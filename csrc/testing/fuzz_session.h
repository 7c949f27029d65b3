// One PoolSet on a host driver, driven by steps, compared with the model after every one of them.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/pool_values.h"
#include "testing/capture_dag.h"
#include "testing/pool_model.h"
#include "testing/step.h"
#include "testing/text.h"
#include "testing/world.h"

namespace cgp {

struct FuzzSetup {
  uint64_t granularity_bytes = 4096;
  uint64_t page_bytes = 4096;  // a power-of-two multiple of the granularity
  uint64_t physical_limit_bytes = uint64_t{1} << 30;
  bool map_memory = true;  // kernels fill blocks, and check them
  // How many steps lie between two looks at what is too slow to compare after each.
  uint64_t inspect_every = 16;
  bool one_pool = false;  // and no other: eager and captured work share streams
  bool tidy_end =
      true;  // at the end free, release and trim everything, or leave it to the destructor
  // Each call to the set fails first, at each of its allocations or of its driver calls.
  bool fail_each = false;
  // So many streams are captured as graphs, into pool 1, and one more never is; the graphs are
  // executed at the end. Without, captures have eight streams in branches that never join.
  uint64_t streams = 0;
  uint64_t seed = 1;     // of the orders in which the graphs are run
  bool forked = true;    // all streams are part of a capture from its begin on
  bool threads = false;  // blocks of odd numbers are freed and used by other threads
};

std::string ToString(const FuzzSetup& setup);

// What is wrong. It is thrown, and no std::exception, which is what the set throws.
struct Complaint {
  std::string text;
};
template <typename... Parts>
[[noreturn]] void Complain(const Parts&... parts) {
  throw Complaint{Text(parts...)};
}
inline void Judge(const std::string& complaint) {
  if (!complaint.empty()) Complain(complaint);
}

class FuzzSession {
 public:
  // In a world of its own, or in one that it shares with others, each of which has another number
  // and may have a thread of its own: they have pools and streams of their own.
  explicit FuzzSession(const FuzzSetup& setup, World* shared = nullptr, uint64_t number = 0);
  // After a complaint work may be pending, which knows this session. The set would wait for it.
  ~FuzzSession() {
    if (own_world_ != nullptr) watch_.Drop();
  }
  FuzzSession(const FuzzSession&) = delete;
  FuzzSession& operator=(const FuzzSession&) = delete;

  // Does one step. Returns what is wrong afterwards, or an empty string. After a complaint nothing
  // more may be asked of the session.
  std::string Run(const Step& step);

  // Ends all scopes, executes the graphs, frees and releases everything, and sees that nothing is
  // left.
  std::string Finish();

  // Whether the last call to the set failed, be it as it should.
  bool last_failed() const { return last_failed_; }
  // How many driver calls were made to fail.
  uint64_t driver_failures() const { return driver_failures_; }
  uint64_t growths_judged() const { return growths_judged_; }
  const FuzzSetup& setup() const { return setup_; }
  const PoolModel& model() const { return model_; }
  std::optional<ScopeKind> OpenScope(uint64_t pool) const { return model_.OpenScope(IdOf(pool)); }
  bool MayName(uint64_t pool) const { return model_.MayName(IdOf(pool)); }
  const std::vector<uint64_t>& live_labels() const { return live_labels_; }
  const std::vector<uint64_t>& freed_labels() const { return freed_labels_; }

 private:
  using Node = CaptureDag::Node;
  enum class Outcome : uint8_t { kDone, kUsageError, kOutOfMemory, kDriverError, kNoHeap, kBug };

  // What became of a call to the real set.
  struct Result {
    Outcome outcome = Outcome::kDone;
    std::string text;
    bool fault_fired = false;
  };

  // What the graphs do with a block.
  struct Tensor {
    Block block;
    size_t graph = 0;  // that it was allocated in
    uint64_t word = 0;
    bool written = false;
    // In the open scope: the capture that touched it, what each access must run behind, and what a
    // write must, too.
    CaptureId capture = kNoCapture;
    std::vector<Node> behind = {};
    std::vector<Node> reads = {};
    std::map<StreamId, Node> unsaid = {};  // the last access of each stream that was not recorded
  };
  // One scope's nodes, [first, end).
  struct Graph {
    Node first = 0;
    Node end = 0;
    bool failed = false;
    bool alone = true;  // it touches no block of another's, and no other one of its
  };

  void Do(const Step& step);
  void Begin(PoolId id, ScopeKind kind, bool capturing = false);
  void End(PoolId id);
  bool Replay(PoolId id, StreamId stream, uint64_t number);
  void Allocate(const Step& step);
  using Ring = std::vector<PhysicalPiece>;  // PoolSnapshot::ring
  // `most_new`: pages, but for what the pool's ring comes to have, which had this before.
  void Placed(const Step& step, const Block& block, const PoolModel::Need& need, uint64_t most_new,
              const Ring& ring_before, const PoolSnapshot& now);
  void Free(uint64_t label);
  void FreeInside(uint64_t label);
  void RefusesAddress(Address address);
  void RecordUse(const Step& step);
  void Checkpoint(PoolId id, uint64_t number);
  void Restore(PoolId id, uint64_t number);
  void Restored(PoolId id, const PoolModel::Checkpoint& checkpoint, const RestoreDelta& delta);
  void Trim();
  void Mend() {
    faulty_.Disarm();
    armed_ = false;
    allocation_fault_.reset();
  }

  // --- fuzz_session_leases.cc ---
  using Describe = std::function<std::string()>;
  std::vector<PoolId> Ids() const;  // of the set, with loans
  void Lend(PoolId id);
  void Sleep(PoolId id, bool keeps_live);
  void Wake(PoolId id);
  void TrimToNeeds(PoolId id);
  void DoWithBlocks(const Step& step);
  // Makes a call that moves pages. What the driver fails it goes on with the next time, so that it
  // is made `again` then. Returns whether it came through.
  bool Move(bool allowed, const Action& call, const Describe& describe, bool may_run_out = false,
            bool keeps_ranges = true);
  // The same of one that does this beside what it says.
  void MirrorMoving(PoolId id, bool allowed, const Action& call, const Action& then);
  // Which pages are away or lent now, as judged by the model; `all_away`: the device has all that
  // leases have.
  void Follow(PoolId id, bool all_away = false);
  static uint64_t PagesIn(const PoolSnapshot& snapshot);
  void LearnHandles(PoolId id);
  std::map<Handle, PoolModel::Pages32> HandlesWith(PoolId id, uint64_t lease) const;
  PoolModel::Pages32 StillLent(PoolId id) const;
  PoolModel::PiecesOf PiecesOf() const {
    return [this](Address address) { return set_.Pieces(address); };
  }
  void ForgetContent(PoolId id);
  // By address and page, what was idle there.
  using Scratch = std::map<std::pair<Address, uint32_t>, std::map<uint64_t, uint64_t>>;
  void Overwrite(PoolId id, const Scratch& scratch);
  std::string Whole(bool with_ranges = true) const;
  uint64_t PagesLeft() const {
    return (setup_.physical_limit_bytes - host_.usage().physical_bytes) / setup_.page_bytes;
  }

  void Close();
  void RunLast(const Steps& steps);
  void EndGraph();
  void DoInGraph(const Step& step);
  void Execute();
  void LeaseBefore(size_t graph);
  void RunGraph(size_t graph);
  bool ReadyToFree(uint64_t label);
  void Touch(const Step& step, bool writes, bool said);
  void BeginOwn(StreamId stream, PoolId pool) {
    if (dag_.IsCapturing(stream)) return;
    model_.BeginCapture(pool, captures_[pool].emplace_back(dag_.Begin(stream)));
  }
  void EndOwn(StreamId stream);
  // Makes the stream part of the scope's first capture, if it is part of none; returns whether it
  // can launch something.
  bool Join(StreamId stream) {
    if (!dag_.IsCapturing(stream)) dag_.Wait(stream, dag_.At(StreamOf(0, graph_pool_)));
    return dag_.IsCaptured(stream);
  }
  // Makes the stream wait for what it does not run behind already.
  void Order(StreamId stream, std::vector<Node> nodes);
  // Before what does not wait is launched on the stream: something that waits for all that the
  // frees of its blocks have relied on, and that the bytes it was given stand behind.
  void Settle(StreamId stream) {
    if (!dag_.LastRunsBehind(stream, relied_on_[stream])) dag_.Launch(stream);
  }
  // Whether the host driver tells of the streams what the program did.
  void CompareFrontiers();
  // Another thread mirrors what frees or uses this block, if it is one of those.
  bool IsOthers(uint64_t label) const { return setup_.threads && label % 2 == 1; }
  void MirrorOf(uint64_t label, const Action& call, const Action& then);

  PoolId IdOf(uint64_t pool) const { return {pool, 7 + number_}; }
  FaultKind SomeFault() const {
    return steps_ % 2 == 0 ? FaultKind::kDriverCall : FaultKind::kAllocation;
  }
  // Makes the call, with whatever is to fail.
  Result Call(const Action& call, std::optional<FaultKind> kind, const Describe& describe = {});
  // Runs `call`, which must succeed iff `allowed` (else throw UsageError), and `then` when it did.
  void Mirror(bool allowed, const Action& call, const Action& then);
  // Those before a call, if they will be looked at.
  World::Books TakeBooks(bool allowed) const;
  void JudgeFailure(const Result& result, bool allowed, const World::Books& before);

  void JudgePieces(PoolId id, const Block& block, const std::vector<PhysicalPiece>& pieces);
  bool StaysForRemains(PoolId id) const;
  const PoolModel::LiveBlock* LiveOf(uint64_t label) const;
  void JudgeDriver() const;
  void CompareStats();
  void CompareUsage(const PoolStats& sum);
  void CompareSnapshot(PoolId id);
  void ComparePeers();
  void CompareMappings(PoolId id);
  void CompareOwners();
  void DoLease(const Step& step);
  void Inspect();
  void Shrunk(const std::set<PoolId>& had_loans);
  void SpareHandles();

  void Submit(const PoolModel::LiveBlock& live, StreamId stream, bool writes, const Clock& behind);
  void Fill(const PoolModel::LiveBlock& live);
  void Refill(const PoolModel::LiveBlock& live);
  void Read(const PoolModel::LiveBlock& live);
  StreamId StreamOf(uint64_t stream, PoolId pool) const;
  void BeginCapture(PoolId pool);
  // The scope failed to end: its streams are not captured any more, and have no business in it.
  bool CaptureIsOver(PoolId pool) const {
    return model_.OpenScope(pool) == ScopeKind::kCapture && !captures_.contains(pool);
  }

  FuzzSetup setup_;
  const uint64_t number_;
  const std::unique_ptr<World> own_world_;
  World& world_;
  HostDriver& host_ = world_.host;
  DriverWatch& watch_ = world_.watch;
  FaultyDriver& faulty_ = world_.faulty;
  PoolSet& set_ = *world_.set;
  CaptureDag dag_{host_.graphs()};
  PoolModel model_;

  std::set<PoolId> asked_;  // whose scope has begun since work went on
  // What was asked for in its scope so far, in one number and in bytes.
  struct Asked {
    uint64_t sizes = 0;
    uint64_t bytes = 0;
    uint64_t most_bytes = 0;  // in any scope
    uint64_t largest = 0;     // block
  };
  std::map<PoolId, Asked> asked_for_;
  std::set<std::pair<PoolId, uint64_t>> known_sizes_;  // in any scope
  // Under way, by the pool whose scope is open; the first is that which streams join.
  std::map<PoolId, std::vector<CaptureId>> captures_;
  std::unordered_map<uint64_t, Address> addresses_;  // of every label that was ever allocated
  std::map<uint64_t, Clock> filled_by_;  // work, by label; not of a block that holds anything
  std::optional<uint64_t> foreign_;      // the label of a block in which a kernel found it
  std::vector<uint64_t> live_labels_;
  std::vector<uint64_t> freed_labels_;
  struct Kept {
    PoolCheckpoint real;
    PoolModel::Checkpoint naive;
  };
  std::map<uint64_t, Kept> checkpoints_;
  PoolStats most_;  // of the sums over all pools, what there was at once
  // (incarnation of its pool, page) of every page, and which page of which handle it turned out to
  // be.
  std::map<std::pair<uint64_t, uint32_t>, std::pair<Handle, uint64_t>> part_of_page_;
  std::map<std::pair<Handle, uint64_t>, std::pair<uint64_t, uint32_t>> page_of_part_;
  const PoolId graph_pool_ = IdOf(1);  // of the graphs
  std::mt19937_64 random_;
  std::map<uint64_t, Tensor> tensors_;  // by label
  std::vector<StreamId> unseen_;  // whose uses other threads recorded since the last allocation
  std::map<uint64_t, CaptureDag::Point> events_;
  std::map<StreamId, std::vector<Node>> relied_on_;  // see Settle()
  std::vector<Graph> graphs_;
  uint64_t growths_judged_ = 0;
  bool armed_ = false;
  Fault fault_;                            // the one armed last
  std::optional<Fault> allocation_fault_;  // of the next call
  // A cleaning-up call failed too, so the driver holds more than the set knows of.
  bool leaky_ = false;
  // Pools that were still there for such remains when they were used again, of whose captures
  // before that the model knows nothing.
  std::set<PoolId> remained_;
  bool peers_settled_ = true;  // the last EnablePeer() came through
  uint64_t steps_ = 0;
  bool last_failed_ = false;
  uint64_t driver_failures_ = 0;
};

}  // namespace cgp
