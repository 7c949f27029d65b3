// Whether torch wants what the memory fraction does not allow to be refused at once.
#pragma once

namespace cgp {

// The setting throw_on_cudamalloc_oom, which torch has from 2.12 on: an allocation for which the
// process's share of the memory does not suffice is rejected without an attempt to make room, and
// observers of its own are told. Apart from the rest, so that tests can say what is set.
bool RejectsAtOnce();

}  // namespace cgp
