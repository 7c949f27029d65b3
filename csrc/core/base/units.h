// Units are types, so that nobody takes a count of granules for a page number or for bytes. Bytes
// stand only where the core is called, and where it calls the driver.
#pragma once

#include <compare>
#include <cstdint>
#include <type_traits>

#include "core/driver.h"

namespace cgp {

// The size and alignment of every block is a multiple of this, as PyTorch's own allocator promises.
inline constexpr uint64_t kGranuleBytes = 512;

// A number of granules.
class Granules {
 public:
  constexpr Granules() = default;
  constexpr explicit Granules(uint64_t count) : count_(count) {}
  static constexpr Granules FromBytesRoundedUp(uint64_t bytes) {
    return Granules(bytes / kGranuleBytes + (bytes % kGranuleBytes != 0 ? 1 : 0));
  }

  constexpr uint64_t count() const { return count_; }
  constexpr uint64_t bytes() const { return count_ * kGranuleBytes; }

  constexpr auto operator<=>(const Granules&) const = default;
  constexpr Granules operator+(Granules other) const { return Granules(count_ + other.count_); }
  constexpr Granules operator-(Granules other) const { return Granules(count_ - other.count_); }
  constexpr Granules operator*(uint64_t times) const { return Granules(count_ * times); }
  constexpr uint64_t operator/(Granules other) const { return count_ / other.count_; }
  constexpr Granules operator%(Granules other) const { return Granules(count_ % other.count_); }
  constexpr Granules& operator+=(Granules other) { return *this = *this + other; }
  constexpr Granules& operator-=(Granules other) { return *this = *this - other; }

 private:
  uint64_t count_ = 0;
};

// How many pages hold a length.
constexpr uint64_t PagesFor(Granules length, Granules page_size) {
  return (length + page_size - Granules(1)) / page_size;
}

// Positions. A page is page_size() of physical memory, numbered in the order of creation. A range
// is a span of reserved addresses, numbered likewise. A virtual page (`vpage`) is one page's width
// of addresses, numbered through all ranges.
enum class PageId : uint32_t {};
enum class RangeId : uint32_t {};
enum class VirtualPage : uint32_t {};

template <typename Id>
concept IsPosition = std::is_same_v<std::underlying_type_t<Id>, uint32_t>;

template <IsPosition Id>
constexpr uint32_t Index(Id id) {
  return static_cast<uint32_t>(id);
}
template <IsPosition Id>
constexpr Id operator+(Id id, uint32_t count) {
  return Id{Index(id) + count};
}
template <IsPosition Id>
constexpr Id operator-(Id id, uint32_t count) {
  return Id{Index(id) - count};
}
template <IsPosition Id>
constexpr Id& operator++(Id& id) {
  return id = id + 1;
}

enum class ScopeKind : uint8_t {
  kCapture,  // the streams that allocate are capturing a graph
  kEager,    // they run what is submitted at once, behind all replays (torch.compile's warm-ups)
  kApart,    // they run at once, and take no byte that a graph needs
  kLoan,     // they run at once, and take what the pool lends, behind all replays
};

// What one allocation got: addresses [address, address + bytes).
struct Block {
  Address address = 0;
  uint64_t bytes = 0;            // a multiple of kGranuleBytes, at least what was asked for
  uint64_t requested_bytes = 0;  // what was asked for
  StreamId stream{};             // the stream it was allocated on

  bool operator==(const Block&) const = default;
};

// A part of a block in physical memory: [offset_bytes, offset_bytes + length_bytes) of a page.
struct PhysicalPiece {
  PageId page{};
  uint64_t offset_bytes = 0;
  uint64_t length_bytes = 0;
};

}  // namespace cgp
