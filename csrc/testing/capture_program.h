// Random programs over streams that are captured.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "testing/fuzz_session.h"
#include "testing/step.h"

namespace cgp {

// A random program of about 20 to 600 steps.
struct CaptureProgram {
  explicit CaptureProgram(uint64_t seed);

  // The steps one by one, for whoever makes them up as the session goes on.
  std::optional<Step> Next(const FuzzSession&) {
    return next < steps.size() ? std::optional(steps[next++]) : std::nullopt;
  }

  FuzzSetup setup;
  Steps steps;
  size_t next = 0;
};

}  // namespace cgp
