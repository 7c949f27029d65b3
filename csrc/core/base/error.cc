#include "core/base/error.h"

#include <charconv>
#include <iterator>

namespace cgp {

std::string Hex(uint64_t value) {
  char digits[16];
  char* const end = std::to_chars(std::begin(digits), std::end(digits), value, 16).ptr;
  return "0x" + std::string(std::begin(digits), end);
}

void FailCheck(const char* condition, const char* file, int line) {
  throw InternalError("cudagraph_pool: internal check failed: " + std::string(condition) + " at " +
                      file + ":" + std::to_string(line) + ". This is a bug: please report it.");
}

}  // namespace cgp
