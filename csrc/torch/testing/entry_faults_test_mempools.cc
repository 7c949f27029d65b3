// Entries that torch.cuda.MemPool and use_mem_pool() call.
#include <vector>

#include "torch/testing/entry_faults_test_world.h"

namespace cgp {
namespace {

void Make(World& w) { w.allocator.createOrIncrefPool(w.device, kId); }
void EndOuter(World& w) {
  w.End(kOther);
  w.Release(kOther);
  w.Release(kId);
}

}  // namespace

std::vector<Entry> EntriesOfMemPools() {
  return {
      {"MakeAMemPool", kNothing, Make, ReleaseOne},
      {"MakeAMemPoolOfTheBases", [](World& w) { w.allocator.scopes().takes_mempools = false; },
       Make, ReleaseOne},
      {"SetUseOnOOMOfAMemPool", Make,
       [](World& w) { w.allocator.setUseOnOOM(w.device, kId, true); }, ReleaseOne},
      {"SetNoSplitOfAMemPool", Make, [](World& w) { w.allocator.setNoSplit(w.device, kId); },
       ReleaseOne},
      {"EmptyAMemPool",
       [](World& w) {
         Captured(w);
         w.Release(kId);
       },
       [](World& w) { w.allocator.emptyCache(kId); },
       [](World& w) {
         w.blocks.clear();
         w.allocator.raw_delete(w.raw);
       }},
      {"AllocateOnOom", MakeUseOnOomPool,
       [](World& w) { w.blocks.push_back(w.allocator.allocate(3 * kPage)); }, ReleaseUseOnOomPool},
      {"RawAllocOnOom", MakeUseOnOomPool, [](World& w) { w.raw = w.allocator.raw_alloc(kPage); },
       ReleaseUseOnOomPool},
      {"BeginANestedScope",
       [](World& w) {
         Make(w);
         w.Begin(kOther);
       },
       [](World& w) { w.BeginEager(kId); },
       [](World& w) {
         w.EndEager(kId);
         w.Release(kId);
         EndOuter(w);
       }},
      {"BeginANestedScopeAgain",
       [](World& w) {
         Make(w);
         w.Begin(kOther);
         UseNested(w);
       },
       [](World& w) { w.BeginEager(kId); },
       [](World& w) {
         w.EndEager(kId);
         w.Release(kId);
         EndOuter(w);
       }},
      {"EndANestedScope",
       [](World& w) {
         Make(w);
         w.Begin(kOther);
         w.BeginEager(kId);
       },
       [](World& w) { w.EndEager(kId); },
       [](World& w) {
         w.Release(kId);
         EndOuter(w);
       }},
      {"EndACaptureWithANestedScope",
       [](World& w) {
         Make(w);
         w.Begin(kOther);
         UseNested(w);
         SetCapture(Stream(1), 0);
       },
       [](World& w) { w.allocator.endAllocateToPool(w.device, kOther); },
       [](World& w) {
         w.Release(kOther);
         w.Release(kId);
       }},
      {"ReleaseAGraphWithANestedScope",
       [](World& w) {
         Make(w);
         w.Begin(kOther);
         UseNested(w);
         w.End(kOther);
         w.Release(kId);
       },
       [](World& w) { w.Release(kOther); }, kNothing},
  };
}

}  // namespace cgp
