// What one allocation got, where its bytes lie, and in what kind of scope and which step of it.
#pragma once

#include <cstdint>

#include "core/base/units.h"
#include "core/driver.h"

namespace cgp {

enum class ScopeKind : uint8_t {
  kCapture,  // the streams that allocate are capturing a graph
  kEager,    // they run what is submitted at once
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
