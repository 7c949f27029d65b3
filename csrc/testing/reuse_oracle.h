// Judges who gets freed bytes in captures, and when a pool may ask for more: by docs/design.md §5,
// as naively as possible, from what the program captured and from nothing that the core says of it.
//
//   allowed  every block whose bytes are handed out again was done with: its fence, the frontiers
//            of its streams when it was freed, lies behind the stream that gets the bytes
//   needed   a block below a page may make the pool grow only where no page has a stretch of bytes
//            for it that the stream was promised
//
// What is promised is less than what is allowed: a programmatic edge anywhere before a stream
// proves nothing; what is freed before a second stream has been seen in a scope may be fenced by
// where the first stream stands then, or held until the scope ends; where there are several captures
// in a scope, a stream may have used a block in another one than it is part of when the block is
// freed; and what is freed, or was used, while a stream of its is in no valid capture, or is freed by
// another thread than the one that began the scope, is open once the device has done all that it had.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "core/pool.h"
#include "testing/capture_dag.h"
#include "testing/driver_watch.h"

namespace cgp {

class ReuseOracle {
 public:
  ReuseOracle(const CaptureDag& dag, const DriverWatch& watch, uint64_t page_bytes);

  void BeginScope();
  // pre: all its captures are over.
  void EndScope();
  // A stream begins a capture in the open scope.
  void BeginCapture(CaptureId capture) {
    if (++captures_ == 1) told_.insert(capture);
  }
  // Whether the pool can know of the capture: it is the scope's first, or has allocated.
  bool IsTold(CaptureId capture) const { return told_.contains(capture); }
  // Nothing of this capture will ever run.
  void Invalidate(CaptureId capture) { invalid_.insert(capture); }

  // A stream allocates in the open scope, or uses another's block: to be said before the pool is
  // told.
  void See(StreamId stream);
  // Returns what is wrong with where a block was put, or nothing. `pages`: those of the pool now.
  std::string Place(const Block& block, const std::vector<PhysicalPiece>& pieces, uint64_t pages);
  // `in`: the capture that has something of the block. `uses`: the streams that were recorded. `eager`: their work that was not captured, by stream up to
  // this number. `same_thread`: the one that began the scope frees it.
  void Free(const Block& block, const std::vector<PhysicalPiece>& pieces,
            const std::set<StreamId>& uses, const std::map<StreamId, uint64_t>& eager = {},
            CaptureId in = kNoCapture, bool same_thread = true);

  // Since the oracle was made.
  uint64_t reused_granules() const { return reused_granules_; }
  uint64_t reused_across_streams() const { return reused_across_streams_; }
  uint64_t growths_judged() const { return growths_judged_; }

 private:
  // Work of a stream that is not captured.
  struct EagerUse {
    StreamId stream{};
    uint64_t work = 0;  // that used the block
  };
  struct Fence {
    uint64_t scope = 0;
    StreamId home{};
    CaptureId capture = kNoCapture;  // that `home` was part of, if the pool is told of it
    bool used_by_others = false;
    bool in_over_capture = false;         // `home` has left the one that had the block
    bool in_one_capture = false;          // all its streams
    bool in_sole_capture = false;         // the scope had no other one yet
    std::vector<CaptureDag::Node> nodes;  // behind which the block is done with
    std::vector<CaptureDag::Node> late;   // the same, as far as promised
    bool promised = true;
    std::vector<EagerUse> eager;
    // The scope's end does not tell that its work is over, but a mark of the device does.
    bool behind_mark = false;
    std::optional<DriverWatch::Mark> mark;
  };
  struct Granule {
    bool used = false;
    std::shared_ptr<Fence> fence;  // null: open to all
  };
  using Page = std::vector<Granule>;

  bool Allowed(const Granule& granule, StreamId stream) const;
  bool Promised(const Granule& granule, StreamId stream) const;
  template <typename Visit>
  void ForEachGranule(const std::vector<PhysicalPiece>& pieces, const Visit& visit);
  std::string JudgeGrowth(const Block& block) const;

  const CaptureDag& dag_;
  const DriverWatch& watch_;
  const uint64_t page_bytes_;
  std::map<uint32_t, Page> pages_;
  uint64_t page_count_ = 0;
  uint64_t scope_ = 0;  // the number of the open or the last one
  bool in_scope_ = false;
  uint64_t captures_ = 0;                         // that were begun in the open scope
  std::set<CaptureId> told_;                      // of these: see IsTold()
  std::set<StreamId> seen_;                       // in the open scope
  std::vector<std::shared_ptr<Fence>> unmarked_;  // those that wait for a mark
  std::vector<std::shared_ptr<Fence>> in_scope_fences_;
  std::set<CaptureId> invalid_;
  uint64_t reused_granules_ = 0;
  uint64_t reused_across_streams_ = 0;
  uint64_t growths_judged_ = 0;
};

}  // namespace cgp
