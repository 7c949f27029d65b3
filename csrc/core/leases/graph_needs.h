// Which addresses the graphs of a pool need, so that everything else may go.
//
// A graph needs every page on which a block lived while it was captured, whoever allocated it, at
// the addresses used then. Graphs are known by their captures. Who knows when a graph is gone names
// its capture, and drops it then. What nobody names is needed as long as the pool has graphs.
//
// What a capture left alive may be read after a replay, though nobody holds it: it is no scratch.
//
// Addresses do not change when pages get new numbers, so all this is in spans of addresses, whole
// pages each. A capture that is made again touches the same spans, so there are few.
//
// invariants:
//   spans are sorted, and neither overlap nor touch one another, but for touched_
//   named_ and last_ have no number in common
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/base/error.h"
#include "core/driver.h"

namespace cgp {

using Spans = std::vector<AddressSpan>;

// Sorts the spans and joins those that overlap or touch. Does not throw.
void Normalise(Spans& spans);

class GraphNeeds {
 public:
  // Makes room for that many Touch() calls.
  void ReserveTouch(std::size_t more);
  // A block lives there in the capture under way. pre: ReserveTouch().
  void Touch(AddressSpan pages) { touched_.push_back(pages); }

  // A capture begins: the one before it stays without a name, if it has none. Does not throw, with
  // what PrepareCapture() has returned.
  struct Needs {
    Spans needs;
    Spans left;  // of these, what lived at the end
  };
  Needs PrepareCapture() const;
  void BeginCapture(Needs prepared);
  void EndCapture(Spans left);  // what lives now; does not throw

  // Names the last capture that has ended; 0 if there is none, it has a name, or another one has
  // begun. Throws with nothing changed.
  uint64_t NameLast();
  void Drop(uint64_t capture) noexcept;
  // Whoever goes back to a checkpoint needs these. Throws with nothing changed.
  void Keep(const Spans& spans);
  // No graph is left.
  void Clear();

  // Calls function(span) for what the capture's graph needs; 0: any graph without a name. May name
  // an address twice.
  template <typename Function>
  void ForEach(uint64_t capture, Function&& function) const {
    for (const Capture& one : named_) {
      if (one.number == capture) ForEachOf(one.needs, function);
    }
    if (capture != 0) return;
    ForEachOf(last_.needs, function);
    ForEachOf(unnamed_.needs, function);
  }
  // The same for what all need, or for what they left.
  template <Spans Needs::*which = &Needs::needs, typename Function>
  void ForEachOfAll(Function&& function) const {
    for (const Capture& one : named_) ForEachOf(one.*which, function);
    ForEachOf(last_.*which, function);
    ForEachOf(unnamed_.*which, function);
  }
  // Captures that nobody named.
  uint64_t unnamed() const { return unnamed_count_ + (last_.number != 0 ? 1 : 0); }

  void Check() const;

 private:
  struct Capture : Needs {
    uint64_t number = 0;  // 0: none
  };

  template <typename Function>
  static void ForEachOf(const Spans& spans, Function&& function) {
    for (const AddressSpan& span : spans) function(span);
  }

  std::vector<Capture> named_;
  Capture last_;   // the last one to end, while nobody has named it
  Needs unnamed_;  // of captures without a name, and of checkpoints
  uint64_t unnamed_count_ = 0;
  Spans touched_;                  // by the capture under way
  std::size_t compact_at_ = 1024;  // how many touched spans are looked through next
  uint64_t numbers_ = 0;           // given so far
};

}  // namespace cgp
