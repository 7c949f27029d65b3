// The core's values as both modules show them. Ids of pools are pairs, ids of pages and streams are
// integers, a piece is a tuple, and what a capture took is a dict.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <tuple>
#include <type_traits>
#include <utility>

#include "core/base/units.h"
#include "core/pool_set.h"

namespace cgp {

inline constexpr std::pair<const char*, uint64_t PoolStats::*> kStatsFields[] = {
    {"page_bytes", &PoolStats::page_bytes},
    {"pages", &PoolStats::pages},
    {"reserved_bytes", &PoolStats::reserved_bytes},
    {"allocated_bytes", &PoolStats::allocated_bytes},
    {"requested_bytes", &PoolStats::requested_bytes},
    {"live_blocks", &PoolStats::live_blocks},
    {"peak_reserved_bytes", &PoolStats::peak_reserved_bytes},
    {"peak_allocated_bytes", &PoolStats::peak_allocated_bytes},
    {"scope_peak_bytes", &PoolStats::scope_peak_bytes},
    {"ranges", &PoolStats::ranges},
    {"page_mappings", &PoolStats::page_mappings},
    {"allocations", &PoolStats::allocations},
    {"frees", &PoolStats::frees},
    {"away_bytes", &PoolStats::away_bytes},
    {"lent_bytes", &PoolStats::lent_bytes},
    {"unnamed_captures", &PoolStats::unnamed_captures},
};

inline std::pair<uint64_t, uint64_t> ToPlain(PoolId id) { return {id.first, id.second}; }
inline uint32_t ToPlain(PageId page) { return Index(page); }
inline uint64_t ToPlain(StreamId stream) { return static_cast<uint64_t>(stream); }
inline std::tuple<uint32_t, uint64_t, uint64_t> ToPlain(const PhysicalPiece& piece) {
  return {Index(piece.page), piece.offset_bytes, piece.length_bytes};
}
inline pybind11::dict ToPlain(const CaptureStats& capture) {
  using pybind11::literals::operator""_a;
  return pybind11::dict(
      "added_bytes"_a = capture.added_bytes, "live_before_bytes"_a = capture.live_before_bytes,
      "peak_bytes"_a = capture.peak_bytes, "first_allocation"_a = capture.first_allocation,
      "allocations"_a = capture.allocations);
}

// Python gets what ToPlain() makes of a value, and passes ids likewise.
template <typename Value>
struct PlainCaster {
  using Plain = decltype(ToPlain(std::declval<Value>()));
  using Inner = pybind11::detail::make_caster<Plain>;
  PYBIND11_TYPE_CASTER(Value, Inner::name);

  bool load(pybind11::handle source, bool convert) {
    Inner inner;
    if (!inner.load(source, convert)) return false;
    const auto plain = pybind11::detail::cast_op<Plain>(inner);
    if constexpr (std::is_enum_v<Value>) {
      value = Value{plain};
    } else {
      value = {plain.first, plain.second};
    }
    return true;
  }
  static pybind11::handle cast(const Value& from, pybind11::return_value_policy policy,
                               pybind11::handle parent) {
    return Inner::cast(ToPlain(from), policy, parent);
  }
};

}  // namespace cgp

namespace pybind11::detail {

template <>
struct type_caster<cgp::PoolId> : cgp::PlainCaster<cgp::PoolId> {};
template <>
struct type_caster<cgp::PageId> : cgp::PlainCaster<cgp::PageId> {};
template <>
struct type_caster<cgp::StreamId> : cgp::PlainCaster<cgp::StreamId> {};
template <>
struct type_caster<cgp::PhysicalPiece> : cgp::PlainCaster<cgp::PhysicalPiece> {};
template <>
struct type_caster<cgp::CaptureStats> : cgp::PlainCaster<cgp::CaptureStats> {};

}  // namespace pybind11::detail
