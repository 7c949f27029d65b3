// One PoolSet on a host driver, driven by operations, compared with the model after every one of
// them.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/pool_checkpoint.h"
#include "core/pool_set.h"
#include "driver/host_driver.h"
#include "testing/allocation_faults.h"
#include "testing/capture_dag.h"
#include "testing/driver_watch.h"
#include "testing/fail_each.h"
#include "testing/faulty_driver.h"
#include "testing/pool_model.h"
#include "testing/pool_operation.h"

namespace cgp {

struct FuzzSetup {
  uint64_t granularity_bytes = 4096;
  uint64_t page_bytes = 4096;  // a power-of-two multiple of the granularity
  uint64_t physical_limit_bytes = uint64_t{1} << 30;
  bool map_memory = true;  // blocks are written to and read back
  // How many operations lie between two looks at what is too slow to compare after each.
  uint64_t inspect_every = 16;
  bool one_pool = false;  // and no other: eager and captured work share streams
  bool tidy_end =
      true;  // at the end free, release and trim everything, or leave it to the destructor
  // Each call to the set fails first, at each of its allocations or of its driver calls.
  bool fail_each = false;
};

std::string ToString(const FuzzSetup& setup);

class FuzzSession {
 public:
  explicit FuzzSession(const FuzzSetup& setup);

  // Does one operation. Returns what is wrong afterwards, or an empty string. After a complaint
  // nothing more may be asked of the session. An operation on a block that was never allocated, or
  // on a checkpoint that was never taken, is left out.
  std::string Run(const PoolOperation& operation);

  // Ends all scopes, frees and releases everything, and sees that nothing is left.
  std::string Finish();

  // Whether the last call to the set failed, be it as it should.
  bool last_failed() const { return last_failed_; }
  // How many driver calls were made to fail.
  uint64_t driver_failures() const { return driver_failures_; }
  const FuzzSetup& setup() const { return setup_; }
  const PoolModel& model() const { return model_; }
  const std::vector<uint64_t>& live_labels() const { return live_labels_; }
  const std::vector<uint64_t>& freed_labels() const { return freed_labels_; }

 private:
  enum class Outcome : uint8_t { kDone, kUsageError, kOutOfMemory, kDriverError, kNoHeap, kBug };

  // What became of a call to the real set.
  struct Result {
    Outcome outcome = Outcome::kDone;
    std::string text;
    bool fault_fired = false;
    std::optional<DriverStatus> status;  // of a DriverError
  };

  // What must be the same after a call that failed.
  struct Books {
    std::string set;
    HostUsage driver;
  };

  std::string Do(const RetainOp& op);
  std::string Do(const BeginOp& op);
  std::string Do(const EndOp& op);
  std::string Do(const ReplayOp& op);
  std::string Do(const ReleaseOp& op);
  std::string Do(const AllocateOp& op);
  std::string Do(const FreeOp& op);
  std::string Do(const FreeInsideOp& op);
  std::string Do(const FreeWildOp& op);
  std::string Do(const RecordUseOp& op);
  std::string Do(const CheckpointOp& op);
  std::string Do(const RestoreOp& op);
  std::string Do(const TrimOp& op);
  std::string Do(const ProgressOp& op);
  std::string Do(const EnablePeerOp& op);
  std::string Do(const FailOp& op);
  std::string Do(const MendOp& op);
  std::string Do(const FailAllocationOp& op);
  std::string Do(const InspectOp& op);

  static PoolId IdOf(uint64_t pool) { return {pool, 7}; }
  Result Call(const std::function<void()>& call, std::optional<FaultKind> kind);
  Result Call(const std::function<void()>& call) { return Call(call, SomeFault()); }
  FaultKind SomeFault() const {
    return operations_ % 2 == 0 ? FaultKind::kDriverCall : FaultKind::kAllocation;
  }
  // Makes the call, with whatever is to fail.
  void Make(const std::function<void()>& call, std::optional<FaultKind> kind);
  bool MayFail() const { return armed_ || allocation_fault_; }
  bool CleaningUpFailed(uint64_t calls_before) const;
  // Runs `call`, which must succeed iff `allowed` (else throw UsageError), and `then` when it did.
  std::string Mirror(bool allowed, const std::function<void()>& call,
                     const std::function<void()>& then);
  std::string JudgeFailure(const Result& result, bool allowed, const Books& before);
  std::string Placed(const AllocateOp& op, const Block& block, const PoolModel::Need& need);
  std::string JudgePieces(PoolId id, const Block& block, const std::vector<PhysicalPiece>& pieces);
  bool StaysForRemains(PoolId id) const;
  std::string Restored(PoolId id, const PoolModel::Checkpoint& checkpoint,
                       const RestoreDelta& delta);
  std::string RefusesAddress(Address address);
  const PoolModel::LiveBlock* LiveOf(uint64_t label) const;
  std::string FreeLive(uint64_t label, Address address);
  std::string FirstViolation() const;
  std::string CompareStats();
  std::string CompareUsage(const PoolStats& sum);
  std::string CompareSnapshot(PoolId id);
  std::string ComparePeers();
  std::string Inspect();

  static Kernel KernelOf(uint64_t label, const Block& block, bool writes);
  std::string Read(uint64_t label, const Block& block);
  StreamId StreamOf(uint64_t stream, PoolId pool) const;
  void BeginCapture(PoolId pool);
  bool CaptureIsOver(PoolId pool) const;
  void Work(PoolId pool, StreamId stream);
  std::string Shrunk();
  std::string SpareHandles();
  Books TakeBooks(bool needed) const;

  FuzzSetup setup_;
  HostDriver host_;
  DriverWatch watch_;
  FaultyDriver faulty_;
  SparingDriver sparing_{faulty_};
  std::unique_ptr<PoolSet> set_;
  PoolModel model_;

  std::set<PoolId> asked_;                           // whose scope has begun since work went on
  std::map<PoolId, CaptureId> captures_;             // under way, by the pool whose scope is open
  std::unordered_map<uint64_t, Address> addresses_;  // of every label that was ever allocated
  std::vector<uint64_t> live_labels_;
  std::vector<uint64_t> freed_labels_;
  struct Kept {
    PoolCheckpoint real;
    PoolModel::Checkpoint naive;
  };
  std::map<uint64_t, Kept> checkpoints_;  // by the operation's number
  PoolStats most_;                        // of the sums over all pools, what there was at once
  // (incarnation of its pool, page) of every page, and which page of which handle it turned out to
  // be.
  std::map<std::pair<uint64_t, uint32_t>, std::pair<Handle, uint64_t>> part_of_page_;
  std::map<std::pair<Handle, uint64_t>, std::pair<uint64_t, uint32_t>> page_of_part_;
  bool armed_ = false;
  Fault fault_;                                       // the one armed last
  std::optional<FailAllocationOp> allocation_fault_;  // of the next call
  // A cleaning-up call failed too, so the driver holds more than the set knows of.
  bool leaky_ = false;
  bool peers_settled_ = true;  // the last EnablePeer() came through
  uint64_t operations_ = 0;
  bool last_failed_ = false;
  uint64_t driver_failures_ = 0;
};

}  // namespace cgp
