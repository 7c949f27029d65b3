// Text put together from anything that can be printed, and of what a PoolSet holds.
#pragma once

#include <sstream>
#include <string>

#include "core/pool_set.h"

namespace cgp {

template <typename... Parts>
std::string Text(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

// Who compares two of them sees whether anything has changed.
std::string Describe(const PoolSet& set);

}  // namespace cgp
