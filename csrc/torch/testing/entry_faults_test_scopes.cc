// Entries that begin and end scopes, and that hold and release pools.
#include <vector>

#include "torch/testing/entry_faults_test_world.h"

namespace cgp {

std::vector<Entry> EntriesOfScopes() {
  const auto in_capture = [](World& w) { w.Begin(kId); };
  return {
      {"BeginCapture", kNothing, [](World& w) { w.Begin(kId); }, EndCapture},
      {"BeginCaptureInAKnownPool", Captured, [](World& w) { w.Begin(kId); },
       [](World& w) {
         w.End(kId);
         w.Release(kId);
         FreeAndRelease(w);
       }},
      {"BeginCaptureInTheSharedPool", [](World& w) { w.allocator.scopes().shares_captures = true; },
       [](World& w) { w.Begin(kAnonymous); },
       [](World& w) {
         w.End(kAnonymous);
         w.Release(kAnonymous);
       }},
      {"BeginCaptureOfTheBases", MakeMemPoolOfTheBases, [](World& w) { w.Begin(kId); },
       [](World& w) {
         w.End(kId);
         for (int i = 0; i < 2; ++i) w.Release(kId);
       }},
      {"BeginCaptureAfterOneThatFailed",
       [](World& w) {
         w.Begin(kOther);
         w.allocator.allocate(1000).clear();
         SetCapture(Stream(1), 0);
         w.allocator.scopes().EndFailed(w.device, kOther);
       },
       [](World& w) { w.Begin(kId); }, EndCapture},
      {"BeginEager", CapturedNothing, [](World& w) { w.BeginEager(kId); },
       [](World& w) {
         w.EndEager(kId);
         for (int i = 0; i < 2; ++i) w.Release(kId);
       }},
      {"BeginEagerInAPoolThatBecomesTheBases",
       [](World& w) {
         CapturedNothing(w);
         w.base.users[kOther] = 1;
         w.BeginEager(kOther);
         w.EndEager(kOther);
       },
       [](World& w) { w.BeginEager(kId); },
       [](World& w) {
         w.EndEager(kId);
         for (int i = 0; i < 2; ++i) w.Release(kId);
         for (int i = 0; i < 2; ++i) w.Release(kOther);
       }},
      {"EndCapture",
       [](World& w) {
         w.Begin(kId);
         w.allocator.allocate(3 * kPage).clear();
         SetCapture(Stream(1), 0);
       },
       [](World& w) { w.allocator.endAllocateToPool(w.device, kId); }, ReleaseOne},
      {"EndEager", InEagerScope, [](World& w) { w.EndEager(kId); },
       [](World& w) {
         w.Release(kId);
         FreeAndRelease(w);
       }},
      {"EndCaptureOfTheBases",
       [](World& w) {
         MakeMemPoolOfTheBases(w);
         w.Begin(kId);
         SetCapture(Stream(1), 0);
       },
       [](World& w) { w.allocator.endAllocateToPool(w.device, kId); },
       [](World& w) {
         for (int i = 0; i < 2; ++i) w.Release(kId);
       }},
      {"PauseACapture", in_capture, [](World& w) { w.allocator.endAllocateToPool(w.device, kId); },
       [](World& w) {
         SetCapture(Stream(1), 0);
         w.allocator.endAllocateToPool(w.device, kId);
         w.Release(kId);
       }},
      {"ResumeACapture",
       [](World& w) {
         w.allocator.scopes().shares_captures = true;
         w.Begin(kAnonymous);
         w.allocator.endAllocateToPool(w.device, kAnonymous);
       },
       [](World& w) {
         w.allocator.beginAllocateToPool(w.device, kAnonymous,
                                         [](cudaStream_t stream) { return stream == Stream(1); });
       },
       [](World& w) {
         w.End(kAnonymous);
         w.Release(kAnonymous);
       }},
      {"EndACaptureThatLooksAbandoned",
       [](World& w) {
         w.Begin(kId);
         SetCapture(Stream(1), 0);
         w.allocator.scopes().EndAbandoned();
       },
       [](World& w) { w.allocator.endAllocateToPool(w.device, kId); }, ReleaseOne},
      {"EndAbandonedCaptures",
       [](World& w) {
         w.Begin(kId);
         w.allocator.allocate(3 * kPage).clear();
         SetCapture(Stream(1), 0);
       },
       [](World& w) { w.allocator.scopes().EndAbandoned(); },
       [](World& w) {
         w.allocator.endAllocateToPool(w.device, kId);
         w.Release(kId);
       }},
      {"EndFailedCapture",
       [](World& w) {
         w.Begin(kId);
         w.allocator.allocate(3 * kPage).clear();
         SetCapture(Stream(1), 0);
         w.allocator.scopes().EndAbandoned();
       },
       [](World& w) { w.allocator.scopes().EndFailed(w.device, kId); },
       [](World& w) {
         if (!kGraphReleasesAbandonedPool) return;
         w.allocator.endAllocateToPool(w.device, kId);
         w.Release(kId);
       }},
      {"ReleaseTheLastUser", CapturedNothing, ReleaseOne, kNothing},
      {"ReleaseAPoolThatHoldsMemory", Captured, ReleaseOne,
       [](World& w) {
         w.blocks.clear();
         w.allocator.raw_delete(w.raw);
       }},
      {"ReleaseAPoolOfTheBases", MakeMemPoolOfTheBases, ReleaseOne, kNothing, true},
      {"ReleaseAShare",
       [](World& w) {
         w.allocator.scopes().shares_captures = true;
         w.Begin(kAnonymous);
         w.End(kAnonymous);
       },
       [](World& w) { w.Release(kAnonymous); }, kNothing},
  };
}

}  // namespace cgp
