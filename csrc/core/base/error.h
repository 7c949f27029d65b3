// What the core and drivers throw. Each says what happened, with numbers, and what to do; each leaves
// everything as it was, also where memory runs out. So whoever changes several things makes room
// for all of them first.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace cgp {

// The caller asked for something that is not allowed: an unknown or released pool, a double free, a
// scope begun twice.
struct UsageError : std::logic_error {
  using std::logic_error::logic_error;
};

// Physical memory ran out. Freeing memory elsewhere and asking again may succeed.
struct OutOfMemoryError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What became of a driver call, in the terms that its caller can act on.
enum class DriverStatus : uint8_t {
  kOutOfMemory,     // no physical memory left: freeing some may help
  kOutOfAddresses,  // no virtual addresses left
  kFailed,          // anything else; code and name say what
};

class DriverError : public std::runtime_error {
 public:
  // `call` is the name of the failing function, `code` its return value and `name` that value's
  // symbol; `bytes` is what was asked for (0 where the call has no size); `detail` is a sentence
  // without its full stop on why or what to do, where more is known than the code says.
  DriverError(DriverStatus status, std::string_view call, int code, std::string_view name,
              uint64_t bytes, int device, std::string_view detail = {});

  DriverStatus status() const noexcept { return status_; }
  const std::string& call() const noexcept { return call_; }
  int code() const noexcept { return code_; }
  uint64_t bytes() const noexcept { return bytes_; }
  int device() const noexcept { return device_; }

 private:
  DriverStatus status_;
  std::string call_;
  int code_;
  uint64_t bytes_;
  int device_;
};

// An invariant does not hold: a bug of ours. Thrown rather than aborting, so that a training job
// can save its state.
struct InternalError : std::logic_error {
  using std::logic_error::logic_error;
};

// "0x7f...", as addresses stand in messages.
std::string Hex(uint64_t value);
// "1.50 GiB", as torch has sizes there.
std::string Size(uint64_t bytes);

[[noreturn]] void FailCheck(const char* condition, const char* file, int line);

// So that `more` elements can be added without an allocation. Doubles: vector::reserve() grows to
// exactly what it is told, which would make n calls O(n^2).
template <typename Vector>
void ReserveMore(Vector& vector, std::size_t more) {
  const std::size_t wanted = vector.size() + more;
  if (wanted > vector.capacity()) vector.reserve(std::max(wanted, 2 * vector.capacity()));
}

}  // namespace cgp

// Always on; for conditions that cost no more than the code around them.
#define CGP_CHECK(condition) \
  ((condition) ? void(0) : ::cgp::FailCheck(#condition, __FILE__, __LINE__))
