// What the core and the drivers throw. Each error says what happened, with numbers, and what to do.
// A function that throws leaves everything as it was, even where memory runs out. So code that
// changes several things reserves room for all of them first.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace cgp {

// The caller asked for something that is not allowed: an unknown or released pool, a double free, a
// second scope of a pool.
struct UsageError : std::logic_error {
  using std::logic_error::logic_error;
};

// Physical memory ran out. Freeing memory elsewhere and asking again may succeed.
struct OutOfMemoryError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The result of a failed driver call, in terms that the caller can act on.
enum class DriverStatus : uint8_t {
  kOutOfMemory,     // no physical memory left: freeing some may help
  kOutOfAddresses,  // no virtual addresses left
  kFailed,          // anything else; code and name say what
};

class DriverError : public std::runtime_error {
 public:
  // `call` is the failing function, `code` its return value, and `name` that value's symbol.
  // `bytes` is what was asked for (0: the call has no size). `detail` is a sentence, without its
  // full stop, on why or what to do, where more is known than the code says.
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

// An invariant does not hold: a bug of ours. It is thrown, and the process goes on, so that a
// training job can save its state.
struct InternalError : std::logic_error {
  using std::logic_error::logic_error;
};

// "0x7f...", as addresses stand in messages.
std::string Hex(uint64_t value);
// "1.50 GiB", as in torch's messages.
std::string Size(uint64_t bytes);

[[noreturn]] void FailCheck(const char* condition, const char* file, int line);

// Makes room for `more` elements. It doubles the capacity: vector::reserve() grows to exactly its
// argument, which would make n calls O(n^2).
template <typename Vector>
void ReserveMore(Vector& vector, std::size_t more) {
  const std::size_t wanted = vector.size() + more;
  if (wanted > vector.capacity()) vector.reserve(std::max(wanted, 2 * vector.capacity()));
}

}  // namespace cgp

// Always on, for conditions that cost no more than the code around them.
#define CGP_CHECK(condition) \
  ((condition) ? void(0) : ::cgp::FailCheck(#condition, __FILE__, __LINE__))
