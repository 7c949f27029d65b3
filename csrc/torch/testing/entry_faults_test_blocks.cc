// Entries that allocate, free and use blocks.
#include <vector>

#include "torch/testing/entry_faults_test_world.h"

namespace cgp {

std::vector<Entry> EntriesOfBlocks() {
  const auto allocates = [](size_t bytes) -> Step {
    return [bytes](World& w) { w.blocks.push_back(w.allocator.allocate(bytes)); };
  };
  const auto in_capture = [](World& w) { w.Begin(kId); };
  const auto in_warm_capture = [](World& w) {
    w.Begin(kId);
    w.allocator.allocate(3 * kPage).clear();
  };
  return {
      {"Allocate", kNothing, allocates(1000), [](World& w) { w.blocks.clear(); }},
      {"AllocateInACapture", in_capture, allocates(3 * kPage), EndCapture},
      {"AllocateInAWarmCapture", in_warm_capture, allocates(1000), EndCapture},
      {"AllocateInAnEagerScope", InEagerScope, allocates(6 * kPage), EndEagerScope},
      {"RawAlloc", in_capture, [](World& w) { w.raw = w.allocator.raw_alloc(1000); },
       [](World& w) {
         w.allocator.raw_delete(w.raw);
         w.End(kId);
         w.Release(kId);
       }},
      {"RawAllocWithStream", in_capture,
       [](World& w) { w.raw = w.allocator.raw_alloc_with_stream(1000, Stream(1)); },
       [](World& w) {
         w.allocator.raw_delete(w.raw);
         w.End(kId);
         w.Release(kId);
       }},
      {"RawDeleteInACapture",
       [](World& w) {
         w.Begin(kId);
         w.raw = w.allocator.raw_alloc(1000);
       },
       [](World& w) { w.allocator.raw_delete(w.raw); }, EndCapture, true},
      {"RawDelete", Captured, [](World& w) { w.allocator.raw_delete(w.raw); },
       [](World& w) {
         w.blocks.clear();
         w.Release(kId);
       },
       true},
      {"FreeInACapture",
       [](World& w) {
         w.Begin(kId);
         w.blocks.push_back(w.allocator.allocate(3 * kPage));
       },
       [](World& w) { w.blocks.at(0).clear(); }, EndCapture},
      {"FreeEager",
       [](World& w) {
         Captured(w);
         w.BeginEager(kId);
         w.blocks.push_back(w.allocator.allocate(3 * kPage));
         w.EndEager(kId);
         w.Release(kId);
       },
       [](World& w) { w.blocks.at(1).clear(); }, FreeAndRelease},
      {"RecordUse", Captured,
       [](World& w) { DevicePools::TryRecordUse(w.blocks.at(0).get(), StreamId{9}); },
       FreeAndRelease},
  };
}

}  // namespace cgp
