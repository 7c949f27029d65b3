#include "core/memory/proofs.h"

#include <algorithm>
#include <functional>

#include "core/base/error.h"
#include "core/base/units.h"

namespace cgp {

std::size_t ProofTable::AddStream(CaptureId capture) {
  const std::size_t number = streams_.size();
  streams_.emplace_back().capture = capture;
  try {
    for (Stream& stream : streams_) stream.loans.resize(streams_.size());
    for (std::size_t i = 0; i < fences_.size(); ++i) {
      const auto fence = static_cast<FenceId>(i);
      if (Contains(fence)) Wait(number, fence);
    }
  } catch (...) {
    RemoveLastStream();
    throw;
  }
  return number;
}

void ProofTable::Add(FenceId fence, CaptureId capture, std::span<const GraphNode> nodes,
                     std::optional<std::size_t> owner) {
  CGP_CHECK(!nodes.empty() && !Contains(fence));
  if (fences_.size() <= Index(fence)) fences_.resize(Index(fence) + std::size_t{1});
  Fence& added = fences_[Index(fence)];
  added.first = static_cast<uint32_t>(nodes_.size());
  added.owner = owner;
  for (const GraphNode node : nodes) nodes_.push_back(order_.PositionOf(capture, node));
  added.count = static_cast<uint32_t>(nodes.size());
  try {
    for (std::size_t stream = 0; stream < streams_.size(); ++stream) {
      if (!Wait(stream, fence)) Lend(fence, stream);
    }
  } catch (...) {
    added.count = 0;  // what waits for it by now is passed over
    throw;
  }
  last_ = fence;
}

std::optional<FenceId> ProofTable::LastLike(CaptureId capture, std::span<const GraphNode> nodes,
                                            std::optional<std::size_t> owner) {
  if (!Contains(last_)) return std::nullopt;
  const Fence& last = fences_[Index(last_)];
  if (last.owner != owner || last.count != nodes.size()) return std::nullopt;
  for (uint32_t i = 0; i < last.count; ++i) {
    if (order_.PositionOf(capture, nodes[i]) != nodes_[last.first + i]) return std::nullopt;
  }
  return last_;
}

bool ProofTable::IsProven(FenceId fence, std::size_t stream) const {
  const Fence& known = fences_[Index(fence)];
  return Owns(stream, known) || !FirstMissing(streams_[stream], known);
}

bool ProofTable::IsLent(FenceId fence, std::size_t stream) const {
  const std::optional<std::size_t> owner = fences_[Index(fence)].owner;
  return IsProven(fence, stream) &&
         (!owner || owner == stream || streams_[*owner].loans[stream] != Loan::kRefused);
}

void ProofTable::NoteGrowth(std::size_t stream) {
  std::ranges::replace(streams_[stream].loans, Loan::kOut, Loan::kRefused);
}

bool ProofTable::Lend(FenceId fence, std::size_t stream) {
  const std::optional<std::size_t> owner = fences_[Index(fence)].owner;
  if (!owner || owner == stream) return true;
  Receive(stream, *owner);
  Loan& loan = streams_[*owner].loans[stream];
  if (loan == Loan::kRefused) {
    streams_[stream].refused.push_back(fence);
    return false;
  }
  loan = Loan::kOut;
  return true;
}

void ProofTable::Receive(std::size_t stream, std::size_t other) {
  Loan& loan = streams_[stream].loans[other];
  if (loan == Loan::kRefused) {
    std::vector<FenceId>& refused = streams_[other].refused;
    std::erase_if(refused, [this](FenceId fence) { return !Contains(fence); });
    const auto lent = std::partition(refused.begin(), refused.end(), [&](FenceId fence) {
      return fences_[Index(fence)].owner != stream;
    });
    streams_[other].proven.insert(streams_[other].proven.end(), lent, refused.end());
    refused.erase(lent, refused.end());
  }
  loan = Loan::kNone;
}

void ProofTable::Forfeit(std::size_t number) {
  Stream& stream = streams_[number];
  stream.relies_on_proofs = false;
  stream.owns_from = static_cast<uint32_t>(nodes_.size());
  stream.proven.clear();
  stream.refused.clear();
  last_ = FenceId::kOpen;  // so that LastLike() finds none of before
}

std::span<const FenceId> ProofTable::Advance(std::size_t number, const Frontier& frontier) {
  Stream& stream = streams_[number];
  order_.Advance(stream.reach, frontier, &stream.news);
  for (; !stream.news.empty(); stream.news.pop_back()) Tell(number, stream.news.back().path);
  return stream.proven;
}

// Those who wait at what the stream has reached of the path: one after the other, each of which is
// told before it goes.
void ProofTable::Tell(std::size_t number, PathId path) {
  Stream& stream = streams_[number];
  const auto next = [&] {
    if (Index(path) >= stream.queues.size() || stream.queues[Index(path)].empty()) return false;
    return stream.reach.Contains({path, stream.queues[Index(path)].front().index});
  };
  while (next()) {
    const FenceId fence = stream.queues[Index(path)].front().fence;
    ReserveMore(stream.proven, 1);
    if (Contains(fence) && !Wait(number, fence) && Lend(fence, number)) {
      stream.proven.push_back(fence);
    }
    std::vector<Waiter>& queue = stream.queues[Index(path)];
    std::ranges::pop_heap(queue, std::greater(), &Waiter::index);
    queue.pop_back();
  }
}

bool ProofTable::Wait(std::size_t number, FenceId fence) {
  Stream& stream = streams_[number];
  const Fence& waits = fences_[Index(fence)];
  if (Owns(number, waits)) return false;
  const std::optional<PathPosition> missing = FirstMissing(stream, waits);
  if (!missing) {
    stream.relies_on_proofs = true;
    return false;
  }
  if (stream.queues.size() <= Index(missing->path)) stream.queues.resize(order_.path_count());
  std::vector<Waiter>& queue = stream.queues[Index(missing->path)];
  queue.push_back({.index = missing->index, .fence = fence});
  std::ranges::push_heap(queue, std::greater(), &Waiter::index);
  return true;
}

std::optional<PathPosition> ProofTable::FirstMissing(const Stream& stream,
                                                     const Fence& fence) const {
  for (uint32_t i = 0; i < fence.count; ++i) {
    const PathPosition node = nodes_[fence.first + i];
    if (!stream.reach.Contains(node)) return node;
  }
  return std::nullopt;
}

void ProofTable::Clear() {
  order_.Clear();
  nodes_.clear();
  fences_.clear();
  streams_.clear();
  last_ = FenceId::kOpen;
}

}  // namespace cgp
