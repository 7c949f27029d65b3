// What a program does while its streams are captured, as printable values, and random programs.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace cgp {

// A step that makes no sense where it stands (a block that is not live, a stream that may not wait)
// does nothing, so that a program still means something when steps are taken out of it.
struct CaptureStep {
  enum class Kind : uint8_t {
    kAllocate,     // a block, named `item`, of `amount` bytes on `stream`
    kFree,         // block `item`
    kRead,         // a kernel on `stream` checks block `item`, and says so with RecordUse()
    kWrite,        // one that checks and then fills it
    kReadUnsaid,   // the same without RecordUse(): the block's stream waits before the free
    kWriteUnsaid,  //
    kUse,          // RecordUse() of block `item` by `stream`, without a kernel
    kLaunch,       // a kernel on `stream` that touches nothing
    kLaunchEarly,  // the same, launched programmatically
    kRecord,       // event `item` on `stream`
    kWait,         // `stream` waits for event `item`, recorded at any time before
    kWaitEarly,    // the same, for a programmatic event
    kBeginOwn,     // `stream` begins a capture of its own, as a conditional body does
    kEndOwn,       // it ends one that no other stream is part of, and works on
    kInvalidate,   // the capture that `stream` is part of fails
    kProgress,     // what is not captured: `stream` does one more piece of its work
    kNextGraph,    // the scope ends, and another begins
  };
  Kind kind{};
  uint64_t stream = 0;
  uint64_t item = 0;
  uint64_t amount = 0;
};

std::string ToString(const CaptureStep& step);
// One step a line, as the elements of a std::vector<CaptureStep>.
std::string ToString(const std::vector<CaptureStep>& steps);

struct CaptureSetup {
  uint64_t streams = 2;  // that may be captured; one more never is
  uint64_t page_bytes = 4096;
  uint64_t seed = 1;     // of the orders in which the graphs are run
  bool forked = true;    // all streams are part of the capture from its begin on
  bool threads = false;  // blocks of odd numbers are freed and used by other threads
  // Each call to the pool set fails first, at each of its allocations or of its driver calls.
  bool fail_each = false;
};

std::string ToString(const CaptureSetup& setup);

// A random program of about 20 to 600 steps.
struct CaptureProgram {
  explicit CaptureProgram(uint64_t seed);

  CaptureSetup setup;
  std::vector<CaptureStep> steps;
};

}  // namespace cgp
