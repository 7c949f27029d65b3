// All that differs between the torch releases (2.11 to 2.15) that this one source serves.
//
// The class to be implemented grows in nearly every minor release. A method newer than 2.11 is
// declared in graph_allocator.h without `override`: where the release has it, it overrides by its
// signature; where not, it is an ordinary member that nobody calls. Forwarding one to the base
// compiles only where the base has it, which is what the templates below ask the compiler.
// scripts/check_torch_releases.sh compiles against every release.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/headeronly/version.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace cgp {

inline constexpr int kTorchMajor = TORCH_VERSION_MAJOR;
inline constexpr int kTorchMinor = TORCH_VERSION_MINOR;
static_assert(kTorchMajor == 2 && kTorchMinor >= 11, "torch 2.11 or newer is needed");

// From 2.14 on a CUDAGraph whose capture failed still ends its route and releases its pool, at the
// latest when it is destroyed. Before, it forgets both: whoever finds the route abandoned must
// release the pool in its place.
inline constexpr bool kGraphReleasesAbandonedPool = kTorchMinor >= 14;

// The type that 2.12 names CUDACachingAllocator::OomRejectionObserver.
using OomRejectionObserver = std::function<void(int64_t device, size_t alloc_size,
                                                size_t total_allocated, size_t device_total)>;

template <typename Base>
std::shared_ptr<c10::GatheredContext> ForwardGetContextForPointer(Base& base, const void* pointer) {
  if constexpr (requires { base.getContextForPointer(pointer); }) {
    return base.getContextForPointer(pointer);
  } else {
    return nullptr;
  }
}

template <typename Base>
void ForwardAttachOomRejectionObserver(Base& base, OomRejectionObserver observer) {
  if constexpr (requires { base.attachOomRejectionObserver(observer); }) {
    base.attachOomRejectionObserver(std::move(observer));
  }
}

// Since 2.12 rejections are counted too.
template <typename Stats>
void AddRejections(Stats& stats, int64_t rejections) {
  if constexpr (requires { stats.num_oom_rejections; }) stats.num_oom_rejections += rejections;
}

// Since 2.13 each private pool's reserved bytes are told apart: function(counts) for those of one, made if
// need be.
template <typename Stats, typename Function>
void WithPrivatePool(Stats& stats, c10::MempoolId_t id, const Function& function) {
  if constexpr (requires { stats.reserved_bytes_by_private_pools; }) {
    function(stats.reserved_bytes_by_private_pools[id]);
  }
}
// function(counts in a, counts in b) for all that b has.
template <typename Stats, typename Function>
void ForEachPrivatePool(Stats& a, const Stats& b, const Function& function) {
  if constexpr (requires { a.reserved_bytes_by_private_pools; }) {
    for (const auto& [id, counts] : b.reserved_bytes_by_private_pools) {
      function(a.reserved_bytes_by_private_pools[id], counts);
    }
  }
}
// add(counts of one, counts of the other), and the one is forgotten; if it is there.
template <typename Stats, typename Function>
void MovePrivatePool(Stats& stats, c10::MempoolId_t one, c10::MempoolId_t other,
                     const Function& add) {
  if constexpr (requires { stats.reserved_bytes_by_private_pools; }) {
    auto& pools = stats.reserved_bytes_by_private_pools;
    const auto found = pools.find(one);
    if (found == pools.end()) return;
    const auto counts = found->second;
    pools.erase(found);
    add(counts, pools[other]);
  }
}

// The history's action for what is said of a block afterwards: since 2.14.
template <typename Action>
constexpr std::optional<Action> AnnotateAction() {
  if constexpr (requires { Action::ANNOTATE; }) {
    return Action::ANNOTATE;
  } else {
    return std::nullopt;
  }
}

template <typename Base>
void ForwardMarkCaptureBegin(Base& base, c10::DeviceIndex device) {
  if constexpr (requires { base.markCaptureBegin(device); }) base.markCaptureBegin(device);
}

template <typename Base>
void ForwardMarkCaptureEnd(Base& base, c10::DeviceIndex device) {
  if constexpr (requires { base.markCaptureEnd(device); }) base.markCaptureEnd(device);
}

template <typename Base>
c10::DataPtr ForwardAllocateWithAddress(Base& base, size_t bytes, void* address) {
  if constexpr (requires { base.allocateWithAddress(bytes, address); }) {
    return base.allocateWithAddress(bytes, address);
  } else {
    TORCH_CHECK(false, "allocateWithAddress() came with torch 2.13; this is torch ", TORCH_VERSION);
  }
}

template <typename Base>
bool ForwardSupportsUserMetadata(Base& base) {
  if constexpr (requires { base.supportsUserMetadata(); }) {
    return base.supportsUserMetadata();
  } else {
    return false;
  }
}

template <typename Base>
void ForwardAnnotateMemory(Base& base, const void* pointer, const std::string& metadata) {
  if constexpr (requires { base.annotateMemory(pointer, metadata); })
    base.annotateMemory(pointer, metadata);
}

}  // namespace cgp
