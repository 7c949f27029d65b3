// Recorded captures as the C++ programs read them: text, written by benchmarks/trace_to_text.py
// from the JSON that cudagraph_pool/tools/trace.py describes, or by benchmarks/stream_programs.py,
// which says of programs of several streams what their graphs are, too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace cgp {

struct TraceEvent {
  enum class Kind : uint8_t {
    kAllocate,
    kFree,
    kUse,     // the block is used by the stream, which is not its own
    kLaunch,  // a node is captured on the stream
    kWait,    // the stream waits for what `other` has captured; the first stream begins the capture
  };

  Kind kind = Kind::kAllocate;
  uint64_t block = 0;
  uint64_t bytes = 0;
  uint64_t stream = 0;
  uint64_t other = 0;
};

struct TraceGraph {
  uint64_t key = 0;
  std::vector<TraceEvent> events;
};

using CaptureTrace = std::vector<TraceGraph>;

// Throws std::runtime_error for a file that cannot be read or is not such a text.
CaptureTrace ReadTrace(const std::string& path);

// The graphs at these places, in this order. As in replay_sequence() of trace.py: in another order
// than the recorded one a block that outlives its graph is freed at the start of the next graph.
CaptureTrace InOrder(const CaptureTrace& trace, const std::vector<std::size_t>& places);

// The most that ever lives, each block rounded up to 512 bytes: no allocator that hands out stable
// memory reserves less.
uint64_t MostLiveBytes(const CaptureTrace& trace);

}  // namespace cgp
