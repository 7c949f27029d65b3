#include "core/leases/graph_needs.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace cgp {
namespace {

// All of both, normalised.
Spans Joined(const Spans& first, const Spans& second) {
  Spans all;
  all.reserve(first.size() + second.size());
  std::ranges::copy(first, std::back_inserter(all));
  std::ranges::copy(second, std::back_inserter(all));
  Normalise(all);
  return all;
}

}  // namespace

void Normalise(Spans& spans) {
  std::ranges::sort(spans, {}, &AddressSpan::begin);
  std::size_t joined = 0;
  for (const AddressSpan span : spans) {
    if (joined > 0 && span.begin <= spans[joined - 1].end) {
      spans[joined - 1].end = std::max(spans[joined - 1].end, span.end);
    } else {
      spans[joined++] = span;
    }
  }
  spans.resize(joined);
}

void GraphNeeds::ReserveTouch(std::size_t more) {
  if (touched_.size() >= compact_at_) {
    Normalise(touched_);
    compact_at_ = std::max<std::size_t>(1024, 2 * touched_.size());
  }
  ReserveMore(touched_, more);
}

GraphNeeds::Needs GraphNeeds::PrepareCapture() const {
  if (last_.number == 0) return {};
  return {Joined(unnamed_.needs, last_.needs), Joined(unnamed_.left, last_.left)};
}

void GraphNeeds::BeginCapture(Needs prepared) {
  if (last_.number == 0) return;
  unnamed_ = std::move(prepared);
  ++unnamed_count_;
  last_ = {};
}

void GraphNeeds::EndCapture(Spans left) {
  Normalise(touched_);
  Normalise(left);
  last_.number = ++numbers_;
  last_.left = std::move(left);
  last_.needs = std::exchange(touched_, {});
}

uint64_t GraphNeeds::NameLast() {
  if (last_.number == 0) return 0;
  ReserveMore(named_, 1);
  last_.needs.shrink_to_fit();  // from the room of all touches
  named_.push_back(std::exchange(last_, {}));
  return named_.back().number;
}

void GraphNeeds::Drop(uint64_t capture) noexcept {
  std::erase_if(named_, [&](const Capture& one) { return one.number == capture; });
}

void GraphNeeds::Keep(const Spans& spans) { unnamed_.needs = Joined(unnamed_.needs, spans); }

void GraphNeeds::Clear() {
  named_.clear();
  last_ = {};
  unnamed_ = {};
  unnamed_count_ = 0;
}

void GraphNeeds::Check() const {
  const auto check = [](const Needs& of) {
    for (const Spans* const spans : {&of.needs, &of.left}) {
      for (std::size_t i = 0; i < spans->size(); ++i) {
        CGP_CHECK((*spans)[i].begin < (*spans)[i].end);
        CGP_CHECK(i == 0 || (*spans)[i - 1].end < (*spans)[i].begin);
      }
    }
  };
  for (const Capture& one : named_) {
    CGP_CHECK(one.number > 0 && one.number <= numbers_ && one.number != last_.number);
    check(one);
  }
  check(last_);
  check(unnamed_);
}

}  // namespace cgp
