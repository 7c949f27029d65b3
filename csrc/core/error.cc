#include "core/error.h"

namespace cgp {

void FailCheck(const char* condition, const char* file, int line) {
  throw InternalError("cudagraph_pool: internal check failed: " + std::string(condition) + " at " +
                      file + ":" + std::to_string(line) + ". This is a bug: please report it.");
}

}  // namespace cgp
