// A core of its own for cgp_ablation, which counts its work and takes rules out of it.
//
// It is compiled with -fsanitize-coverage=trace-pc, by which every basic block that runs is counted:
// the count is the same on every run. What libstdc++ does in its own library is not in it.
//
// The rules of core/placement/placement.h that CGP_WITHOUT names, with commas between them, do not apply.
#pragma once

#include <cstdint>

namespace cgp {

extern uint64_t basic_blocks;

}  // namespace cgp
