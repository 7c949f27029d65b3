#include "core/memory/fences.h"

#include <algorithm>
#include <utility>

#include "core/base/error.h"

namespace cgp {

FenceId FenceTable::FindOrAdd(std::optional<StreamId> owner, bool eager) {
  for (const FenceId id : listed_) {
    const Fence& fence = fences_[Index(id)];
    if (fence.owner != owner || (fence.state == State::kScope) == eager) continue;
    // New held bytes are not covered by an older mark.
    if (owner || fence.mark == nullptr) return id;
  }
  const State state = eager ? State::kEager : State::kScope;
  return listed_.emplace_back(Add({.state = state, .owner = owner, .mark = {}}));
}

FenceId FenceTable::ForProof() { return Add({.state = State::kScope, .owner = {}, .mark = {}}); }

void FenceTable::MakeProof(FenceId stream_fence) {
  std::erase(listed_, stream_fence);
  fences_[Index(stream_fence)].owner.reset();
}

FenceTable::Opened FenceTable::EndScope() {
  opened_.clear();
  for (uint32_t i = 0; i < fences_.size(); ++i) {
    if (fences_[i].state == State::kScope) opened_.push_back(FenceId{i});
  }
  return Open();
}

bool FenceTable::NeedsMark() const {
  return std::ranges::any_of(listed_, [&](FenceId id) { return fences_[Index(id)].needs_mark(); });
}

std::shared_ptr<SharedEvent> FenceTable::Mark() {
  auto mark = std::make_shared<SharedEvent>(driver_);
  for (const FenceId id : listed_) {
    Fence& fence = fences_[Index(id)];
    if (fence.needs_mark()) fence.mark = mark;
  }
  return mark;
}

FenceTable::Opened FenceTable::Poll() {
  // All are asked before any is opened, so that a failing driver leaves no fence half-way.
  opened_.clear();
  for (const FenceId id : listed_) {
    const Fence& fence = fences_[Index(id)];
    if (fence.mark != nullptr && driver_.EventDone(fence.mark->get())) {
      opened_.push_back(id);
    }
  }
  return Open();
}

FenceTable::Opened FenceTable::OpenAll() {
  opened_ = listed_;
  return Open();
}

FenceTable::Opened FenceTable::Open() {
  std::ranges::sort(opened_);
  for (const FenceId id : opened_) {
    fences_[Index(id)] = Fence{};
    unused_.push_back(id);
  }
  std::erase_if(listed_, [&](FenceId id) { return fences_[Index(id)].state == State::kUnused; });
  return opened_;
}

bool FenceTable::empty() const { return fences_.size() == kNamedFences + unused_.size(); }

FenceId FenceTable::Add(Fence fence) {
  ReserveMore(fences_, 1);
  for (auto* const ids : {&listed_, &unused_, &opened_}) ids->reserve(fences_.capacity());
  FenceId id{static_cast<uint32_t>(fences_.size())};
  if (unused_.empty()) {
    fences_.push_back(std::move(fence));
  } else {
    id = unused_.back();
    unused_.pop_back();
    fences_[Index(id)] = std::move(fence);
  }
  return id;
}

}  // namespace cgp
