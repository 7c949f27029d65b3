// One pool of a PoolSet, and what the set knows of it. Only the set's own files include this.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "core/memory/fences.h"
#include "core/pool.h"
#include "core/pool_set.h"

namespace cgp {

struct PoolSet::Member {
  Member(PoolId the_id, Driver& driver, const PoolOptions& options)
      : id(the_id), pool(driver, options) {}

  const PoolId id;
  Pool pool;
  int users = 0;
  bool told_of_capture = false;        // when its scope began: one that nobody else knows of
  std::set<PoolId>::node_type unused;  // its entry in PoolSet, while it has users
  // What the set's usage counts for it, as of the pool's last change.
  Gauge* reserved_bytes = nullptr;  // its own in PoolSet
  uint64_t handles = 0;
  uint64_t free_extents = 0;

  // --- Leases ---
  //
  // A pool that lends has one loan, a pool of its own: a handle's free bytes are free in at most
  // one of the two.
  Member* loan = nullptr;
  Member* lender = nullptr;  // of a loan
  // Of a loan whose scope is open: the lender took back what was free. The pool's own scope may be
  // over then, until the next allocation.
  bool is_withdrawn = false;
  bool is_open() const { return pool.in_scope() || is_withdrawn; }
  // Of a lender: what came back may still be used by work that borrowed; a replay waits for that.
  bool needs_mark = false;
  std::shared_ptr<SharedEvent> borrowers;  // mark
  std::map<LeaseId, std::vector<Address>> leased_blocks;
  // A block is gone: another one may come to start there.
  void Forget(Address address) {
    for (auto& [lease, blocks] : leased_blocks) std::erase(blocks, address);
  }
  LeaseId last_lease = Pool::kLent;
};

}  // namespace cgp
