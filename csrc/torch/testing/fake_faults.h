// Failures on demand, for tests: of one call that the calling thread makes to something that is
// faked, or of one allocation of it.
#pragma once

#include <cstdint>

namespace cgp::faults {

enum class Kind : uint8_t { kDriver, kBase, kMemory };

struct State {
  Kind kind{};
  int64_t left = 0;  // until one fails; 0: none will
  bool for_good = false;
  bool failed = false;
  int within = 0;  // fakes: what these allocate does not fail
};
inline constinit thread_local State state;

// Of this kind the `number`th from now on fails, counted from 1; with `for_good` all that follow,
// too.
inline void Arm(Kind kind, int64_t number, bool for_good = false) {
  state.kind = kind;
  state.left = number;
  state.for_good = for_good;
  state.failed = false;
}

// Nothing fails any more. Returns whether something did.
inline bool Disarm() {
  state.left = 0;
  return state.failed;
}

// Whether this one is to fail.
inline bool Fails(Kind kind) {
  if (state.left == 0 || state.kind != kind || state.within > 0 || --state.left > 0) return false;
  if (state.for_good) state.left = 1;
  return state.failed = true;
}

// While one lives the thread is in something faked, where nothing fails.
class Within {
 public:
  Within() { ++state.within; }
  ~Within() { --state.within; }
  Within(const Within&) = delete;
  Within& operator=(const Within&) = delete;
};

}  // namespace cgp::faults
