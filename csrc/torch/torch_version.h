// All that differs between the torch releases, 2.11 to 2.15, that this one source serves.
//
// The class to implement grows in nearly every minor release. A method newer than 2.11 is declared
// in graph_allocator.h without `override`. If the release has it, it overrides by its signature,
// else it is an ordinary member that nobody calls. Forwarding such a method compiles only if the
// base has it, which the templates below ask the compiler. scripts/build_wheels.sh builds for every
// release.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/headeronly/version.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>

namespace cgp {

inline constexpr int kTorchMinor = TORCH_VERSION_MINOR;
static_assert(TORCH_VERSION_MAJOR == 2 && kTorchMinor >= 11, "torch 2.11 or newer is needed");

// From 2.14 on, a CUDAGraph whose capture failed still ends its route and releases its pool, at the
// latest when it is destroyed. Older releases do neither, so whoever finds the route abandoned must
// release the pool.
inline constexpr bool kGraphReleasesAbandonedPool = kTorchMinor >= 14;

// The class of the base, the allocator that was installed before.
using Base = c10::cuda::CUDACachingAllocator::CUDAAllocator;

// The type that 2.12 names CUDACachingAllocator::OomRejectionObserver.
using OomRejectionObserver = std::function<void(int64_t device, size_t alloc_size,
                                                size_t total_allocated, size_t device_total)>;

// Name(base, arguments...) is base.method(arguments...) if the base has that, else `absent`.
#define CGP_FORWARD(Name, method, absent)                                             \
  template <typename Allocator, typename... Arguments>                                \
  auto Name(Allocator& base, Arguments&&... arguments) {                              \
    if constexpr (requires { base.method(std::forward<Arguments>(arguments)...); }) { \
      return base.method(std::forward<Arguments>(arguments)...);                      \
    } else {                                                                          \
      return absent;                                                                  \
    }                                                                                 \
  }
CGP_FORWARD(ForwardGetContextForPointer, getContextForPointer,
            std::shared_ptr<c10::GatheredContext>())
CGP_FORWARD(ForwardAttachOomRejectionObserver, attachOomRejectionObserver, void())
CGP_FORWARD(ForwardMarkCaptureBegin, markCaptureBegin, void())
CGP_FORWARD(ForwardMarkCaptureEnd, markCaptureEnd, void())
CGP_FORWARD(ForwardSupportsUserMetadata, supportsUserMetadata, false)
CGP_FORWARD(ForwardAllocateWithAddress, allocateWithAddress, c10::DataPtr())
CGP_FORWARD(ForwardAnnotateMemory, annotateMemory, void())
#undef CGP_FORWARD

// The reserved bytes of each private pool, which torch tells apart since 2.13; before, nullptr.
template <typename Stats>
auto* ReservedByPrivatePool(Stats& stats) {
  if constexpr (requires { stats.reserved_bytes_by_private_pools; }) {
    return &stats.reserved_bytes_by_private_pools;
  } else {
    return static_cast<std::map<c10::MempoolId_t, c10::CachingAllocator::StatArray>*>(nullptr);
  }
}

// The history's action for a note on an existing block: since 2.14.
template <typename Action>
constexpr std::optional<Action> AnnotateAction() {
  if constexpr (requires { Action::ANNOTATE; }) {
    return Action::ANNOTATE;
  } else {
    return std::nullopt;
  }
}

}  // namespace cgp
