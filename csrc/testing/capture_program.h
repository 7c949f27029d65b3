// Random programs over streams that are captured.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "testing/step.h"

namespace cgp {

class CaptureSession;

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

  // The steps one by one, for whoever makes them up as the session goes on.
  std::optional<Step> Next(const CaptureSession&) {
    return next < steps.size() ? std::optional(steps[next++]) : std::nullopt;
  }

  CaptureSetup setup;
  Steps steps;
  size_t next = 0;
};

}  // namespace cgp
