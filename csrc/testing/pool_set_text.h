// What a PoolSet holds, as a text: who compares two of them sees whether anything has changed.
#pragma once

#include <string>

#include "core/pool_set.h"

namespace cgp {

std::string Describe(const PoolSet& set);

}  // namespace cgp
