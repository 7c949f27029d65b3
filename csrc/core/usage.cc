#include "core/usage.h"

namespace cgp {

bool BlockUsage::Add(const Block& block) {
  bool raised = count.Add(1);
  raised |= bytes.Add(block.bytes);
  raised |= requested_bytes.Add(block.requested_bytes);
  return raised;
}

void BlockUsage::Remove(const Block& block) {
  count.Remove(1);
  bytes.Remove(block.bytes);
  requested_bytes.Remove(block.requested_bytes);
}

bool SetUsage::Allocated(const Block& block) {
  bool raised = all.Add(block);
  raised |= (block.bytes <= kLargestSmallBlock ? small : large).Add(block);
  free_bytes.Remove(block.bytes);
  return raised;
}

void SetUsage::Freed(const Block& block) {
  all.Remove(block);
  (block.bytes <= kLargestSmallBlock ? small : large).Remove(block);
  free_bytes.Add(block.bytes);
}

bool SetUsage::Grew(uint64_t handle_count, uint64_t bytes) {
  bool raised = handles.Add(handle_count);
  raised |= reserved_bytes.Add(bytes);
  free_bytes.Add(bytes);
  return raised;
}

void SetUsage::Shrank(uint64_t handle_count, uint64_t bytes) {
  handles.Remove(handle_count);
  reserved_bytes.Remove(bytes);
  free_bytes.Remove(bytes);
}

void SetUsage::SetFreeExtents(uint64_t count) {
  if (count > free_extents.current) {
    free_extents.Add(count - free_extents.current);
  } else {
    free_extents.Remove(free_extents.current - count);
  }
}

template <typename Function>
void SetUsage::ForEachGauge(Function function) {
  for (BlockUsage* blocks : {&all, &small, &large}) {
    function(blocks->count);
    function(blocks->bytes);
    function(blocks->requested_bytes);
  }
  for (Gauge* gauge : {&handles, &reserved_bytes, &free_bytes, &free_extents}) function(*gauge);
}

void SetUsage::ResetPeaks() {
  ForEachGauge([](Gauge& gauge) { gauge.ResetPeak(); });
}

void SetUsage::ResetTraffic() {
  ForEachGauge([](Gauge& gauge) { gauge.ResetTraffic(); });
}

}  // namespace cgp
