// What a PoolSet must do, said as naively as possible: a table of granules per page, each with what
// must have happened before it may be handed out again. It places nothing; it is told where the
// real set put a block, and judges that.
//
// Two questions are asked of every free granule, and they are not the same:
//  - MayTake: would it be safe? Decided by what the device has really done, so that a fence that
//  the real set forgot,
//    or recorded too early, is seen whatever the set believes.
//  - MustOffer: has the set promised it? Then it may not ask the driver for a page in its place.
//
// In captures both follow from what the program captured (docs/design.md §5). Promised is less than
// safe: a programmatic edge anywhere before a stream proves nothing; what is freed before a second
// stream has been seen in a scope may be fenced by where the first one stands then, or held until
// the scope ends; a stream that takes pages that nobody had in the scope may lease nothing more to
// those that there are; where there are several captures in a scope, a stream may have used a block
// in another one than it is part of when that is freed; and what is freed, or was used, while a
// stream of its is in no valid capture, or is freed by another thread than the one that began the
// scope, is open once the device has done all that it had.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/base/units.h"
#include "core/pool.h"
#include "core/pool_set.h"
#include "testing/capture_dag.h"
#include "testing/driver_watch.h"

namespace cgp {

// Of a map's entry; clang 14 cannot do std::views::values of libstdc++.
inline constexpr auto kKey = [](const auto& entry) { return entry.first; };
inline constexpr auto kValue = [](const auto& entry) { return entry.second; };

class PoolModel {
  // Work that may still touch bytes: what was submitted to `stream` up to number `work`.
  struct Pending {
    StreamId stream{};
    uint64_t work = 0;
  };

 public:
  struct LiveBlock {
    uint64_t label = 0;
    PoolId pool;
    Block block;
    std::vector<PhysicalPiece> pieces;
    std::set<StreamId> uses = {};  // other than the block's own stream
    bool eager = false;  // allocated in an eager scope, or used by another stream outside captures
    // Of a block that a restore brought back: what was under way on its bytes then, and the streams
    // that the set may believe to be at work on them, or to have been before.
    std::vector<Pending> inherited = {};
    std::set<StreamId> suspects = {};
  };
  // What lived in a pool at one moment.
  struct Checkpoint {
    PoolId pool;
    uint64_t incarnation = 0;
    std::vector<LiveBlock> blocks;
  };
  // What a restore did to blocks.
  struct Restored {
    std::vector<LiveBlock> dropped;
    std::vector<LiveBlock> revived;
    std::string complaint;  // about where a revived one lies
  };

  // `watch` plays the device, `dag` is what streams captured; `page_bytes` is the size of the pages
  // of every pool.
  PoolModel(DriverWatch& watch, const CaptureDag& dag, uint64_t page_bytes);

  // --- What is expected of the next call ---

  bool Contains(PoolId id) const { return pools_.contains(id); }
  int UseCount(PoolId id) const { return Contains(id) ? Find(id)->users : 0; }
  std::optional<ScopeKind> OpenScope(PoolId id) const {
    return Contains(id) ? Find(id)->scope : std::nullopt;
  }
  bool AnyCaptureOpen() const;
  const LiveBlock* LiveAt(Address start) const;
  const LiveBlock* Holding(Address address) const;
  // What a trim gives back at least, and at most: pages without a live byte stay where their handle
  // has one, and the model knows no handles.
  struct Trimmable {
    uint64_t least = 0;
    uint64_t most = 0;
  };
  Trimmable TrimmableBytes() const;
  // What an allocation costs at most, in whole pages (docs/design.md §4). pre: a scope is open.
  struct Need {
    uint64_t ideal = 0;  // without which no placement does, as long as each block is in one range
    uint64_t whole_pages = 0;  // that are free and promised
    bool apart = false;        // it may come again, and have pages of its own
    uint64_t beyond = 0;       // pages that may be made with those that are needed
    // What the driver must have for the allocation to succeed.
    uint64_t least_new() const { return ideal > whole_pages ? ideal - whole_pages : 0; }
    // No more, but for a block that comes again while its like lives.
    uint64_t most_new() const { return least_new() > 0 ? least_new() + beyond : 0; }
  };
  // `kept`: what the pool keeps for blocks that alternate, which others get only where nothing
  // else is left.
  Need NeedOf(PoolId id, uint64_t bytes, StreamId stream,
              const std::vector<PhysicalPiece>& kept = {}) const;
  // How many of the pages that hold these pieces are free as a whole and promised, or do not exist
  // yet.
  uint64_t WholePagesOf(PoolId id, const std::vector<PhysicalPiece>& pieces, StreamId stream) const;
  uint64_t Pages(PoolId id) const { return Contains(id) ? Find(id)->pages.size() : 0; }
  Checkpoint TakeCheckpoint(PoolId id) const;
  // Whether the checkpoint may be restored in the pool now.
  bool MayRestore(PoolId id, const Checkpoint& checkpoint) const;

  // --- What the real set did. pre: it was allowed to. ---

  void Retain(PoolId id) { ++FindOrCreate(id).users; }
  // With `may_mark` the device is marked, if that tells the set anything.
  void BeginScope(PoolId id, ScopeKind kind, bool may_mark);
  // pre: all its captures are over.
  void EndScope(PoolId id, bool may_mark);
  // A stream begins a capture in the open scope.
  void BeginCapture(PoolId id, CaptureId capture);
  // Whether the pool can know of the capture: it is the scope's first, or has allocated.
  bool IsTold(PoolId id, CaptureId capture) const { return Find(id)->told.contains(capture); }
  // A stream asks for a block in the open scope, or uses another's: to be said before the pool is
  // told.
  void See(PoolId id, StreamId stream);
  // A graph that was captured into the pool runs on the stream.
  void Replay(PoolId id, StreamId stream);
  void Release(PoolId id);
  // A stream asked for a block, whether it then got one or not. pre: a scope is open.
  void Ask(PoolId id, StreamId stream);
  // Returns what is wrong with the placement, or an empty string. `pages` is how many the pool has
  // with it: those that are made ahead of need are known by nothing else.
  std::string Place(uint64_t label, PoolId id, const Block& block,
                    std::vector<PhysicalPiece> pieces, uint64_t pages);
  // `in`: the open capture that has something of the block. `same_thread`: the one that began the
  // scope frees it.
  void Free(Address start, CaptureId in = kNoCapture, bool same_thread = true);
  void RecordUse(Address start, StreamId stream);
  // Unused pools without live blocks are gone.
  void Trim();
  // A trim has taken pages from an unused pool in which blocks live: so many are left, all of them
  // free but for the pieces that `pieces_of` tells of. Returns what is wrong with these.
  using PiecesOf = std::function<std::vector<PhysicalPiece>(Address)>;
  std::string Shrink(PoolId id, uint64_t pages, const PiecesOf& pieces_of);
  Restored Restore(const Checkpoint& checkpoint, const PiecesOf& pieces_of);

  // --- Leases (pool_model_leases.cc) ---
  //
  // A page that somebody else has is nobody's here. The pool of a loan is one like others, whose
  // pages come and go. Which pages are one handle the model is told, since they go together.

  using Pages32 = std::set<uint32_t>;
  static constexpr uint64_t kAsleep = 1;  // who has a page
  static constexpr uint64_t kLent = 2;    // others are leases of blocks
  static PoolId LoanOf(PoolId id) { return {id.first | uint64_t{1} << 63, id.second}; }
  static PoolId LenderOf(PoolId loan) { return {loan.first & ~uint64_t{0} >> 1, loan.second}; }
  static bool IsLoan(PoolId id) { return id.first >> 63 != 0; }

  bool IsAsleep(PoolId id) const { return Contains(id) && Find(id)->asleep; }
  bool HasLoan(PoolId id) const { return !IsLoan(id) && Contains(LoanOf(id)); }
  // Whether it may give pages away.
  bool MayLease(PoolId id) const {
    return Contains(id) && !OpenScope(id) && !OpenScope(LoanOf(id)) && watch_.MayQuiesce();
  }
  uint64_t LeaseOf(PoolId id, uint32_t page) const;
  uint64_t PagesWith(PoolId id, uint64_t lease) const;  // 0: anybody but a borrower
  bool AnyAway(const LiveBlock& block) const;
  // On which pages a block of a checkpoint lies by now.
  std::vector<uint32_t> PagesAt(PoolId id, const LiveBlock& block) const;
  void LearnHandles(PoolId id, const std::map<uint32_t, uint32_t>& first_pages);
  // The pages of whole handles without a lease: `goes` is asked of one by its live blocks' labels.
  Pages32 PagesOf(PoolId id, const std::function<bool(const std::set<uint64_t>&)>& goes) const;
  // The device is idle, and the lease has these pages besides those that it had.
  void Evict(PoolId id, const Pages32& pages, uint64_t lease);
  void BringBack(PoolId id, uint64_t lease);
  // So many of the leases' pages the device really has.
  void SetAway(PoolId id, uint64_t pages);
  // Others may have had the pages, so eager work in it comes behind all of the device's.
  void NoteShared(PoolId id) { Known(id).captured_pages = Known(id).pages.size(); }
  // It reserved so much in between, which can be no more than all of its pages.
  void NoteMoment(PoolId id, uint64_t reserved) {
    ModelPool& pool = Known(id);
    if (reserved > pool.pages.size() * page_bytes_) return;
    pool.stats.peak_reserved_bytes = std::max(pool.stats.peak_reserved_bytes, reserved);
  }
  void SetAsleep(PoolId id, bool asleep) { Known(id).asleep = asleep; }
  void Quiesced(PoolId id);  // and the pool knows
  // These pages are with borrowers, or with the device; of a loan these went back, of so many.
  // Return what is wrong.
  std::string FollowLender(PoolId id, const Pages32& gone);
  std::string FollowLoan(PoolId id, uint64_t pages, const Pages32& gone, const PiecesOf& pieces_of);
  void DropLoan(PoolId id) { pools_.erase(LoanOf(id)); }
  void DropIfGone(PoolId id);
  // The lender has taken back what is free: the loan's next allocation begins its scope anew.
  bool IsWithdrawn(PoolId loan) const { return Contains(loan) && Find(loan)->withdrawn; }
  void Renew(PoolId loan);
  // What a trim leaves: pages of handles in which something lives, that graphs need (not those of
  // an unused pool, which has none) or that are `lent` on. Renumbers them.
  std::string Keep(PoolId id, bool has_graphs, const Pages32& lent, const PiecesOf& pieces_of);

  void KeepLive(PoolId id);  // for a checkpoint
  // Captures whose graphs may be there still, in their order; 0 for one that nobody named.
  std::vector<uint64_t> Graphs(PoolId id) const;
  bool MayName(PoolId id) const { return Contains(id) && Find(id)->may_name; }
  void Name(PoolId id, uint64_t name);
  void Drop(PoolId id, uint64_t name);
  // Pages that the graphs so named need, by address; with `more` what counts as needed besides.
  std::map<Address, uint32_t> NeedsOf(PoolId id, std::optional<uint64_t> name, bool more) const;
  // Work of borrowers for which a replay waits.
  std::vector<std::pair<StreamId, uint64_t>> Borrowers(PoolId id) const;
  // Which granules of the page nothing of the pool is on or may still be at work on, and how many
  // blocks have lived in each.
  std::map<uint64_t, uint64_t> Idle(PoolId id, uint32_t page) const;
  std::map<uint64_t, std::pair<uint64_t, std::set<uint64_t>>>& leases(PoolId id) {
    return Known(id).block_leases;
  }

  // --- Comparison ---

  // Everything but ranges and page_mappings, which depend on the policy.
  PoolStats Stats(PoolId id) const { return pools_.at(id).stats; }
  std::vector<PoolId> ids() const;
  const std::map<Address, LiveBlock>& live() const { return live_; }
  // Of its pages and what is behind them: another one each time that these are made anew.
  uint64_t Numbering(PoolId id) const { return pools_.at(id).numbering; }
  bool IsCurrent(uint64_t numbering) const;
  // Granules that were handed out again in the capture scope that they were freed in.
  uint64_t reused_granules() const { return reused_granules_; }
  uint64_t reused_across_streams() const { return reused_across_streams_; }

 private:
  struct Fence {
    StreamId owner{};
    bool promised_at_once = false;  // to the owner
    bool used_by_others = false;
    uint64_t scope = 0;              // the number, if freed in a capture scope, and then:
    CaptureId capture = kNoCapture;  // that the owner was part of, if the pool is told of it
    bool in_over_capture = false;    // the owner has left the one that had the block
    bool in_one_capture = false;     // all its streams
    bool in_sole_capture =
        false;              // the scope had no other one yet, and all that it did was captured
    bool promised = false;  // to whoever is behind these:
    std::vector<CaptureDag::Node> nodes;  // behind which the block is done with
    std::vector<CaptureDag::Node> late;   // the same, as far as promised
    std::vector<Pending> pending;
    // Of pending work the set knows that it is over once the device has passed a mark that was made
    // later.
    std::optional<Clock> mark;
    // What several streams used may be kept until all of it is done with: the mark is this one's
    // then.
    std::shared_ptr<const Fence> group;
  };
  struct Granule {
    uint64_t label = 0;            // of the live block, 0 if free
    std::shared_ptr<Fence> fence;  // of a free one; null: free to all
    bool captured = false;         // a graph may use it
    bool leased = false;           // somebody else has it
    bool needed = false;           // a graph does, so it is not for the scope apart
    uint64_t blocks = 0;           // that have lived here
  };
  struct Capture {
    uint64_t name = 0;
    std::map<Address, uint32_t> pages;  // on which blocks lived
    std::map<Address, uint32_t> left;   // the same, when it ended
    bool gone = false;                  // its graph is, though nobody said so
  };
  struct ModelPool {
    uint64_t incarnation = 0;  // of which checkpoints are
    uint64_t numbering = 0;
    int users = 0;
    std::optional<ScopeKind> scope;
    uint64_t scope_number = 0;
    std::map<uint32_t, std::vector<Granule>> pages;
    bool had_scopes = false;      // before the one that is open
    uint64_t captured_pages = 0;  // that there were when the last capture ended
    uint64_t captures = 0;        // that were begun in the open scope
    std::set<CaptureId> told;     // of these: see IsTold()
    std::set<StreamId> seen;      // in the open scope
    // In the open scope the first took pages that nobody had in it when the second had been seen.
    std::set<std::pair<StreamId, StreamId>> may_refuse;
    std::vector<std::shared_ptr<Fence>> in_scope;  // of what was freed in the open capture scope
    // What has asked for blocks in the open scope, as part of which captures.
    std::set<std::pair<StreamId, CaptureId>> asked;
    bool used_by_others = false;                   // in the open scope, a block by another stream
    std::vector<std::shared_ptr<Fence>> unmarked;  // to be marked with the device
    std::shared_ptr<Fence> held;                   // the group of what is held until then
    std::vector<Pending> replays;                  // of the graphs that were captured into it
    bool replays_unknown = false;                  // the open scope could not mark the device
    // Of eager scopes, by the stream that may take at once what is behind them.
    std::map<StreamId, std::vector<std::shared_ptr<Fence>>> stream_fences;
    std::map<uint32_t, uint64_t> leases;      // by page
    std::map<uint32_t, uint32_t> first_page;  // of each page's handle
    uint64_t away = 0;                        // pages
    bool asleep = false;
    bool withdrawn = false;  // of a loan
    // By number: the set's, and the blocks' labels.
    std::map<uint64_t, std::pair<uint64_t, std::set<uint64_t>>> block_leases;
    std::vector<Capture> graphs;
    bool may_name = false;                // the last one
    std::map<Address, uint32_t> touched;  // by the capture under way
    std::map<Address, uint32_t> kept;     // for checkpoints
    std::vector<Pending> borrowers;
    PoolStats stats;
  };

  // The free granules of a page that are promised to a stream, in granules.
  struct PageRuns {
    uint64_t head = 0;
    uint64_t tail = 0;
    uint64_t longest = 0;
  };

  static bool MayComeAgain(const ModelPool& pool) {
    return pool.scope.has_value() && pool.had_scopes;
  }
  uint64_t PagesBeyond(const ModelPool& pool, uint64_t bytes, StreamId stream) const;
  std::pair<StreamId, CaptureId> InCapture(StreamId stream) const;
  PageRuns Runs(const ModelPool& pool, const std::vector<Granule>& page, StreamId stream) const;
  // Whether all of the page is free, and nothing that the open scope has captured was on it.
  bool IsUntouched(const ModelPool& pool, PageId page) const;
  const ModelPool* Find(PoolId id) const;
  ModelPool& Known(PoolId id) { return pools_.at(id); }
  ModelPool& FindOrCreate(PoolId id);
  void GoOn(ModelPool& pool, StreamId stream) const;
  static bool IsEager(const ModelPool& pool) {
    return pool.scope && pool.scope != ScopeKind::kCapture;
  }
  void Touch(std::map<Address, uint32_t>& pages, const LiveBlock& block) const;
  void Recount(ModelPool& pool) const;
  void Return(ModelPool& pool, uint32_t page);
  bool Unused(PoolId id) const {
    return UseCount(id) == 0 && !OpenScope(id) && !OpenScope(LoanOf(id)) && !IsLoan(id);
  }
  bool IsOver(PoolId id) const {
    return Unused(id) && Find(id)->stats.live_blocks == 0 && !HasLoan(id);
  }
  void Mark(ModelPool& pool) const;
  void Hold(ModelPool& pool, const std::function<bool(uint32_t)>& pages);
  bool MayTake(const ModelPool& pool, const Granule& granule, StreamId stream) const;
  bool MustOffer(const ModelPool& pool, const Granule& granule, StreamId stream) const;
  std::string Misshapen(const LiveBlock& block) const;
  template <typename Visit>
  void ForEachGranule(ModelPool& pool, const LiveBlock& block, const Visit& visit) const;
  // The granules are the block's now. Returns why they may not be, with or without what must have
  // happened before.
  std::string Occupy(ModelPool& pool, const LiveBlock& block, bool fenced);
  static void Count(ModelPool& pool, const Block& block);
  std::shared_ptr<Fence> FenceOf(const ModelPool& pool, const LiveBlock& block) const;
  // What follows from the captures of the open scope; returns whether the scope's end tells that
  // the block is done with.
  bool AddCaptured(const ModelPool& pool, const LiveBlock& block, CaptureId in, bool same_thread,
                   Fence& fence) const;
  bool KnownToBeDone(const Fence& fence) const;
  // `fresh`: fences of which the set has not asked yet whether they are done.
  std::string Revive(ModelPool& pool, const std::set<const Fence*>& fresh, LiveBlock block);
  static void Hold(ModelPool& pool, Fence& fence);
  std::string Describe(const Fence& fence) const;

  DriverWatch& watch_;
  const CaptureDag& dag_;
  const uint64_t page_bytes_;
  const uint64_t granules_per_page_;
  std::map<PoolId, ModelPool> pools_;
  std::map<Address, LiveBlock> live_;
  uint64_t next_incarnation_ = 1;
  uint64_t next_scope_ = 1;
  uint64_t reused_granules_ = 0;
  uint64_t reused_across_streams_ = 0;
};

}  // namespace cgp
