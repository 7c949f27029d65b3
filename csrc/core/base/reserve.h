// Room in vectors for what must not fail later.
//
// Each entry of the core either does all it says or throws and changes nothing, also where memory
// runs out. So whoever changes several things makes room for all of them first.
#pragma once

#include <algorithm>
#include <cstddef>

namespace cgp {

// So that `more` elements can be added without an allocation. Doubles: vector::reserve() grows to
// exactly what it is told, which would make n calls O(n^2).
template <typename Vector>
void ReserveMore(Vector& vector, std::size_t more) {
  const std::size_t wanted = vector.size() + more;
  if (wanted > vector.capacity()) vector.reserve(std::max(wanted, 2 * vector.capacity()));
}

}  // namespace cgp
