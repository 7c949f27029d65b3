// A live block's place in the capture that allocated it.
#pragma once

#include <cstdint>

namespace cgp {

// `capture` is kNone for what no capture is told of.
struct Ticket {
  static constexpr uint32_t kNone = ~uint32_t{0};
  uint32_t capture = kNone;
  uint32_t step = 0;
};

}  // namespace cgp
