// Scripted programs that take every path on which the core calls the driver or allocates, for tests in
// which one of these fails.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "core/pool_checkpoint.h"
#include "core/pool_set.h"
#include "driver/host_driver.h"
#include "testing/driver_watch.h"
#include "testing/faulty_driver.h"
#include "testing/sparing_driver.h"

namespace cgp {

enum class Script : uint8_t {
  kEverything,  // takes every path on which the driver is called
  kPlanned,     // one program captured at three sizes, the last one planned from the first two
  kAhead,       // two streams make a large pool grow, which is given pages ahead of need
  kRestores,    // goes back to a checkpoint while work that was not captured is under way
};

// A set with a fault to come, and steps that use it.
class Workload {
 public:
  using Step = std::function<void()>;
  // Makes a call to the set; by default nothing but that.
  using Caller = std::function<void(const std::function<void()>& call)>;

  static constexpr PoolId kOne{0, 1};
  static constexpr PoolId kTwo{0, 2};
  static constexpr StreamId kA{1};
  static constexpr StreamId kB{2};
  static constexpr uint64_t kPage = 4096;

  explicit Workload(Script script) {
    switch (script) {
      case Script::kEverything:
        TakeEveryPath();
        break;
      case Script::kPlanned:
        for (const uint64_t scale : {1U, 2U, 4U}) Capture(scale);
        Finish(kOne, 3);
        break;
      case Script::kAhead:
        GrowAhead();
        Finish(kOne, 1);
        break;
      case Script::kRestores:
        GoBack();
        Finish(kTwo, 2);
        break;
    }
  }

  ~Workload() { watch_.Quiesce(); }

  const std::vector<Step>& steps() const { return steps_; }
  PoolSet& set() { return set_; }
  FaultyDriver& faulty() { return faulty_; }
  DriverWatch& watch() { return watch_; }
  void set_caller(Caller caller) { caller_ = std::move(caller); }
  HostUsage usage() const { return host_.usage(); }

 private:
  // Sizes in eighths of a page; of those that grow, at scale 1.
  void Capture(uint64_t scale) {
    const auto allocate = [&](size_t slot, uint64_t eighths) {
      steps_.emplace_back([=, this] {
        caller_([&] { blocks_[slot] = set_.Allocate(kOne, eighths * (kPage / 8), kA).address; });
        watch_.MarkUsed();
      });
    };
    const auto free = [&](size_t slot) {
      steps_.emplace_back([=, this] { caller_([&] { set_.Free(blocks_[slot]); }); });
    };
    steps_.emplace_back([this] { caller_([&] { set_.BeginScope(kOne, ScopeKind::kCapture); }); });
    allocate(7, 6 * scale);
    free(7);
    allocate(0, 16 * scale);
    allocate(1, 4 * scale);
    allocate(2, 12 * scale);
    free(1);
    allocate(3, 20 * scale);
    free(0);
    allocate(4, 8);
    allocate(5, 44 * scale);
    free(2);
    allocate(6, 28 * scale);
    free(3);
    free(5);
    free(6);
    steps_.emplace_back([this] { caller_([&] { set_.EndScope(kOne); }); });
    free(4);
  }

  // Of 600 pages a 128th are 4.
  void GrowAhead() {
    const auto allocate = [&](size_t slot, uint64_t bytes, StreamId stream) {
      steps_.emplace_back([=, this] {
        caller_([&] { blocks_[slot] = set_.Allocate(kOne, bytes, stream).address; });
        watch_.MarkUsed();
        host_.graphs().Launch(stream);
      });
    };
    steps_.emplace_back([this] { caller_([&] { set_.BeginScope(kOne, ScopeKind::kCapture); }); });
    steps_.emplace_back([this] {
      capture_ = host_.graphs().Begin(kA);
      host_.graphs().Wait(kB, host_.graphs().Record(kA));
    });
    allocate(0, 600 * kPage, kA);
    allocate(1, kPage, kB);      // and 4 ahead
    allocate(2, 7 * kPage, kA);  // takes them
    allocate(3, kPage, kB);
    steps_.emplace_back([this] { host_.graphs().End(capture_); });
    steps_.emplace_back([this] { caller_([&] { set_.EndScope(kOne); }); });
    for (size_t slot = 0; slot < 4; ++slot) {
      steps_.emplace_back([=, this] { caller_([&] { set_.Free(blocks_[slot]); }); });
    }
  }

  void GoBack() {
    const auto call = [this](auto what) {
      steps_.emplace_back([=, this] { caller_([&] { what(); }); });
    };
    const auto allocate = [&](size_t slot, uint64_t bytes, StreamId stream) {
      steps_.emplace_back([=, this] {
        caller_([&] { blocks_[slot] = set_.Allocate(kTwo, bytes, stream).address; });
        watch_.MarkUsed();
        watch_.Submit(stream);
      });
    };
    call([this] { set_.BeginScope(kTwo, ScopeKind::kEager); });
    for (size_t slot = 0; slot < 3; ++slot) allocate(slot, 2 * kPage + 512 * slot, kA);
    allocate(3, 512, kB);
    call([this] { set_.RecordUse(blocks_[0], kB); });
    call([this] { set_.RecordUse(blocks_[1], kB); });
    call([this] { set_.EndScope(kTwo); });
    call([this] { checkpoint_ = set_.Checkpoint(kTwo); });
    call([this] { set_.Free(blocks_[0]); });
    call([this] { set_.Free(blocks_[3]); });
    call([this] { set_.BeginScope(kTwo, ScopeKind::kEager); });
    for (size_t slot = 4; slot < 8; ++slot) allocate(slot, 1024 * slot, kB);
    call([this] { set_.EndScope(kTwo); });
    for (int i = 0; i < 2; ++i) call([this] { set_.Restore(kTwo, checkpoint_); });
    for (size_t slot = 0; slot < 4; ++slot) call([=, this] { set_.Free(blocks_[slot]); });
    steps_.emplace_back([this] { watch_.FinishAll(); });
  }

  void Finish(PoolId id, int users) {
    for (int user = 0; user < users; ++user) {
      steps_.emplace_back([=, this] { caller_([&] { set_.Release(id); }); });
    }
    steps_.emplace_back([this] { caller_([&] { set_.Trim(); }); });
  }

  void TakeEveryPath() {
    const auto allocate = [this](size_t slot, PoolId id, uint64_t bytes, StreamId stream) {
      return [=, this] {
        caller_([&] { blocks_[slot] = set_.Allocate(id, bytes, stream).address; });
        watch_.MarkUsed();
      };
    };
    const auto free = [this](size_t slot) {
      return [=, this] { caller_([&] { set_.Free(blocks_[slot]); }); };
    };
    const auto use = [this](size_t slot, StreamId stream) {
      return [=, this] { caller_([&] { set_.RecordUse(blocks_[slot], stream); }); };
    };
    const auto begin = [this](PoolId id, ScopeKind kind) {
      return [=, this] { caller_([&] { set_.BeginScope(id, kind); }); };
    };
    const auto end = [this](PoolId id) {
      return [=, this] { caller_([&] { set_.EndScope(id); }); };
    };
    const auto launch = [this](StreamId stream) {
      return [=, this] { host_.graphs().Launch(stream); };
    };
    // `stream` waits for what `other` has captured.
    const auto join = [this](StreamId stream, StreamId other) {
      return [=, this] { host_.graphs().Wait(stream, host_.graphs().Record(other)); };
    };
    steps_ = {
        begin(kOne, ScopeKind::kCapture),
        [this] { capture_ = host_.graphs().Begin(kA); },
        launch(kA),
        allocate(0, kOne, 3 * kPage, kA),  // a new range
        allocate(1, kOne, 512, kA),        // a page in part use
        free(0),
        allocate(2, kOne, 6 * kPage + 512, kA),  // stitched, and new pages appended
        [this] { caller_([&] { set_.EnablePeer(1); }); },
        join(kB, kA),
        allocate(3, kOne, kPage, kB),
        launch(kB),
        use(2, kB),
        free(2),  // asks where both streams stand
        join(kA, kB),
        launch(kA),
        launch(kA),
        allocate(8, kOne, kPage, kA),  // asks whether A stands behind that
        [this] { host_.graphs().End(capture_); },
        end(kOne),
        begin(kTwo, ScopeKind::kEager),
        allocate(4, kTwo, 2 * kPage, kA),
        allocate(5, kTwo, 2 * kPage, kB),
        use(5, kA),
        free(4),
        free(5),
        end(kTwo),  // records events
        begin(kTwo, ScopeKind::kEager),
        allocate(6, kTwo, 4 * kPage, kB),  // asks whether they are done
        end(kTwo),
        use(6, kA),
        free(6),  // records events outside of a scope
        begin(kOne, ScopeKind::kCapture),
        allocate(7, kOne, 20 * kPage, kB),
        free(7),
        end(kOne),
        free(1),
        free(3),
        free(8),
        [this] { caller_([&] { set_.Release(kOne); }); },
        [this] { caller_([&] { set_.Release(kOne); }); },
        [this] { caller_([&] { set_.Release(kTwo); }); },
        [this] { caller_([&] { set_.Release(kTwo); }); },
        [this] { caller_([&] { set_.Trim(); }); },
    };
  }

  HostDriver host_{{.device = 2, .granularity = kPage, .map_memory = false}};
  DriverWatch watch_{host_};
  FaultyDriver faulty_{watch_};
  SparingDriver sparing_{faulty_};
  PoolSet set_{sparing_};
  Caller caller_ = [](const std::function<void()>& call) { call(); };
  PoolCheckpoint checkpoint_;
  CaptureId capture_ = kNoCapture;
  Address blocks_[9] = {};
  std::vector<Step> steps_;
};

}  // namespace cgp
