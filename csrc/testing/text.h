// Text put together from anything that can be printed.
#pragma once

#include <sstream>
#include <string>

namespace cgp {

template <typename... Parts>
std::string Text(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

}  // namespace cgp
