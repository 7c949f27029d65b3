#include "core/base/error.h"

#include <array>
#include <charconv>
#include <cstddef>
#include <cstdio>
#include <iterator>

namespace cgp {

std::string Hex(uint64_t value) {
  char digits[16];
  char* const end = std::to_chars(std::begin(digits), std::end(digits), value, 16).ptr;
  return "0x" + std::string(std::begin(digits), end);
}

std::string Size(uint64_t bytes) {
  constexpr std::array kUnits{"bytes", "KiB", "MiB", "GiB"};
  auto size = static_cast<double>(bytes);
  std::size_t unit = 0;
  for (; size > 1024 && unit + 1 < kUnits.size(); ++unit) size /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.2f %s", size, kUnits[unit]);
  return text;
}

void FailCheck(const char* condition, const char* file, int line) {
  throw InternalError("cudagraph_pool: internal check failed: " + std::string(condition) + " at " +
                      file + ":" + std::to_string(line) + ". This is a bug: please report it.");
}

}  // namespace cgp
