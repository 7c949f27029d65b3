// What the core throws. Each says what happened, with numbers, and what to do; each leaves
// everything as it was.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace cgp {

// The caller asked for something that is not allowed: an unknown or released pool, a double free, a
// scope begun twice.
class UsageError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

// Physical memory ran out. Freeing memory elsewhere and asking again may succeed.
class OutOfMemoryError : public std::runtime_error {
 public:
  OutOfMemoryError(const std::string& what, uint64_t requested_bytes)
      : std::runtime_error(what), requested_bytes_(requested_bytes) {}

  uint64_t requested_bytes() const noexcept { return requested_bytes_; }

 private:
  uint64_t requested_bytes_;
};

// An invariant does not hold: a bug of ours. Thrown rather than aborting, so that a training job
// can save its state.
class InternalError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

// "0x7f...", as addresses stand in messages.
std::string Hex(uint64_t value);
// "1.50 GiB", as torch has sizes there.
std::string Size(uint64_t bytes);

[[noreturn]] void FailCheck(const char* condition, const char* file, int line);

}  // namespace cgp

// Always on; for conditions that cost no more than the code around them.
#define CGP_CHECK(condition) \
  ((condition) ? void(0) : ::cgp::FailCheck(#condition, __FILE__, __LINE__))
