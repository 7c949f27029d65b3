// Entries that ask, tell, set and clean up.
#include <string>
#include <utility>
#include <vector>

#include "torch/install.h"
#include "torch/testing/entry_faults_test_world.h"

namespace cgp {
namespace {

namespace cca = c10::cuda::CUDACachingAllocator;

// One that changes nothing, of a device with a pool that holds memory.
Entry Asks(std::string name, Step call) {
  return {std::move(name), &Captured, std::move(call), &FreeAndRelease, true};
}

std::vector<Entry> EntriesThatAsk() {
  return {
      Asks("GetDeviceStats", [](World& w) { w.allocator.getDeviceStats(w.device); }),
      Asks("ResetAccumulatedStats", [](World& w) { w.allocator.resetAccumulatedStats(w.device); }),
      Asks("ResetPeakStats", [](World& w) { w.allocator.resetPeakStats(w.device); }),
      Asks("Snapshot", [](World& w) { w.allocator.snapshot(); }),
      Asks("SnapshotOfAPool", [](World& w) { w.allocator.snapshot(kId, false); }),
      Asks("GetPoolUseCount", [](World& w) { w.allocator.getPoolUseCount(w.device, kId); }),
      Asks("CheckPoolLiveAllocations",
           [](World& w) {
             EXPECT_TRUE(w.allocator.checkPoolLiveAllocations(w.device, kId,
                                                              {w.blocks.at(0).get(), w.raw}));
           }),
      Asks("GetCheckpointState",
           [](World& w) { w.checkpoint = w.allocator.getCheckpointState(w.device, kId); }),
      Asks("GetBaseAllocation", [](World& w) { w.allocator.getBaseAllocation(w.raw, nullptr); }),
      Asks("ShareIpcHandle", [](World& w) { w.allocator.shareIpcHandle(w.blocks.data()); }),
      Asks("GetIpcDevPtr", [](World& w) { w.allocator.getIpcDevPtr("handle"); }),
      Asks("GetMemoryFraction", [](World& w) { w.allocator.getMemoryFraction(w.device); }),
      Asks("GetMemoryInfoOfSegments",
           [](World& w) { w.allocator.getExpandableSegmentSizes(w.device); }),
      Asks("CacheInfo",
           [](World& w) {
             size_t largest = 0;
             w.allocator.cacheInfo(w.device, &largest);
           }),
      Asks("IsEnabled", [](World& w) { w.allocator.isEnabled(); }),
      Asks("EnableCaching", [](World& w) { w.allocator.enable(true); }),
      Asks("Initialise", [](World& w) { w.allocator.init(1); }),
      Asks("CopyData", [](World& w) { w.allocator.copy_data(nullptr, nullptr, 0); }),
      Asks("MemcpyAsync",
           [](World& w) {
             w.allocator.memcpyAsync(w.raw, w.device, w.raw, w.device, 1, Stream(1), true);
           }),
      Asks("EnablePeerAccess",
           [](World& w) { w.allocator.enablePeerAccess(static_cast<DeviceIndex>(0), w.device); }),
      Asks("GetContextForPointer", [](World& w) { w.allocator.getContextForPointer(w.raw); }),
      Asks("AnnotateMemory", [](World& w) { w.allocator.annotateMemory(w.raw, "text"); }),
      Asks("UserMetadata",
           [](World& w) {
             w.allocator.setUserMetadata("text");
             w.allocator.getUserMetadata();
           }),
      Asks("RecordAnnotation", [](World& w) { w.allocator.recordAnnotation({}); }),
      Asks("SetUseOnOOM", [](World& w) { w.allocator.setUseOnOOM(w.device, kId, false); }),
      Asks("SetNoSplit", [](World& w) { w.allocator.setNoSplit(w.device, kOther); }),
      Asks("MarkCapture",
           [](World& w) {
             w.allocator.markCaptureBegin(w.device);
             w.allocator.markCaptureEnd(w.device);
           }),
      Asks("AttachOutOfMemoryObserver",
           [](World& w) {
             w.allocator.attachOutOfMemoryObserver([](int64_t, size_t, size_t, size_t) {});
           }),
      Asks("AttachOomRejectionObserver",
           [](World& w) {
             w.allocator.attachOomRejectionObserver([](int64_t, size_t, size_t, size_t) {});
           }),
      Asks("AttachAllocatorTraceTracker",
           [](World& w) {
             w.allocator.attachAllocatorTraceTracker([](const History::TraceEntry&) {});
           }),
  };
}

void ForgetHistory(World& w) {
  w.allocator.recordHistory(false, nullptr, 0, History::When::NEVER, true, {});
  FreeAndRelease(w);
}

void RunOut(World& w) {
  try {
    w.allocator.allocate(kPhysicalLimit);
    ADD_FAILURE() << "was allocated";
  } catch (const c10::OutOfMemoryError&) {  // NOLINT(bugprone-empty-catch): so it is to be
  }
}

std::vector<Entry> EntriesThatChange() {
  return {
      {"RecordHistory", &Captured,
       [](World& w) {
         w.allocator.recordHistory(true, nullptr, 100, History::When::ALL, true, {"oom", "alloc"});
       },
       &ForgetHistory},
      {"PushCompileContext", kNothing,
       [](World& w) {
         std::string context = "a context that is longer than what a string holds in itself";
         w.allocator.pushCompileContext(context);
       },
       [](World& w) { w.allocator.popCompileContext(); }},
      {"SetMemoryFraction", &Captured,
       [](World& w) { w.allocator.setMemoryFraction(0.5, w.device); }, &FreeAndRelease},
      {"SetMemoryFractionAgain",
       [](World& w) {
         Captured(w);
         w.allocator.setMemoryFraction(0.75, w.device);
       },
       [](World& w) { w.allocator.setMemoryFraction(0.5, w.device); }, &FreeAndRelease},
      {"SetCheckpointPoolState",
       [](World& w) {
         Captured(w);
         w.checkpoint = w.allocator.getCheckpointState(w.device, kId);
         w.blocks.clear();
         w.blocks.reserve(2);  // what comes back
       },
       [](World& w) {
         auto delta = w.allocator.setCheckpointPoolState(w.device, w.checkpoint);
         for (DataPtr& data : delta.dataptrs_allocd) {
           if (data.get() == w.raw) data.release_context();
           w.blocks.push_back(std::move(data));
         }
       },
       &FreeAndRelease},
      {"EmptyCache",
       [](World& w) {
         Captured(w);
         FreeAndRelease(w);
       },
       [](World& w) { w.allocator.emptyCache(); }, kNothing, true},
      {"FreeUnusedPools",
       [](World& w) {
         Captured(w);
         FreeAndRelease(w);
       },
       [](World& w) { w.allocator.scopes().TryTrim(); }, kNothing, true},
      {"CreateOrIncrefPoolOfOurs", &Captured,
       [](World& w) { w.allocator.createOrIncrefPool(w.device, kId); },
       [](World& w) {
         w.Release(kId);
         FreeAndRelease(w);
       }},
      {"RegisterPool", kNothing,
       [](World& w) {
         w.allocator.scopes().Register(w.device, {0, 1});
       },
       [](World& w) {
         w.allocator.releasePool(w.device, {0, 1});
       }},
      {"ReleaseRegisteredPool",
       [](World& w) {
         w.allocator.scopes().Register(w.device, {0, 1});
       },
       [](World& w) {
         w.allocator.releasePool(w.device, {0, 1});
       },
       kNothing},
      {"AllocateWithAddressInACapture", [](World& w) { w.Begin(kId); },
       [](World& w) {
         try {
           w.allocator.allocateWithAddress(1000, nullptr);
           ADD_FAILURE() << "was allocated";
         } catch (const c10::Error&) {  // NOLINT(bugprone-empty-catch): so it is to be
         }
       },
       &EndCapture},
      {"RunOutInACapture",
       [](World& w) {
         w.Begin(kId);
         w.blocks.push_back(w.allocator.allocate(kPage));
       },
       &RunOut, &EndCapture},
      {"RunOutInAnEagerScope", &InEagerScope, &RunOut, &EndEagerScope},
      {"RunOutEagerly",
       [](World& w) {
         Captured(w);
         w.base.largest = 1000;
       },
       &RunOut, &FreeAndRelease},
  };
}

}  // namespace

std::vector<Entry> OtherEntries() {
  std::vector<Entry> entries = EntriesThatAsk();
  for (Entry& entry : EntriesThatChange()) entries.push_back(std::move(entry));
  return entries;
}

}  // namespace cgp
