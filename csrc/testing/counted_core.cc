#include "testing/counted_core.h"

#include <cstdlib>
#include <functional>
#include <set>
#include <sstream>
#include <string>
#include <string_view>

#include "core/placement/placement.h"

namespace cgp {

uint64_t basic_blocks = 0;

bool On(const char* rule) {
  static const auto kOut = [] {
    const char* const names = std::getenv("CGP_WITHOUT");
    std::istringstream text(names == nullptr ? "" : names);
    std::set<std::string, std::less<>> out;
    for (std::string name; std::getline(text, name, ',');) out.insert(name);
    return out;
  }();
  return !kOut.contains(std::string_view(rule));
}

}  // namespace cgp

// The compiler's name for it. NOLINTBEGIN(bugprone-reserved-identifier)
extern "C" void __sanitizer_cov_trace_pc();
extern "C" void __sanitizer_cov_trace_pc() { ++cgp::basic_blocks; }
// NOLINTEND(bugprone-reserved-identifier)
