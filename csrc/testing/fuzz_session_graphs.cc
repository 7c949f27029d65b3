// What the streams of a FuzzSession do: kernels on their own, and graphs that are captured and
// executed.
//
// A program of graphs is right by construction: a stream waits before it touches what another one
// touched, and says so with RecordUse() or makes the block's stream wait before the free. So
// whatever finds other data than was written is the pool's fault.
#include <algorithm>
#include <iterator>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "testing/fuzz_session.h"

namespace cgp {
namespace {

using enum Step::Kind;

// How many streams a capture has that is no graph.
constexpr uint64_t kStreams = 8;

// Fresh memory never holds it: the word of a label is odd.
Kernel KernelOf(const PoolModel::LiveBlock& live, bool writes) {
  return {live.block, live.label * 0x9E3779B97F4A7C15U | 1, writes};
}

}  // namespace

// A stream is not captured while it also works eagerly; one after the other it may be both.
StreamId FuzzSession::StreamOf(uint64_t stream, PoolId pool) const {
  constexpr uint64_t kMostStreams = 100;
  const bool apart = !setup_.one_pool && model_.OpenScope(pool) == ScopeKind::kCapture;
  return StreamId{kMostStreams * number_ + stream + (apart ? kStreams * pool.first : 0)};
}

void FuzzSession::BeginCapture(PoolId pool) {
  const StreamId first = StreamOf(0, pool);
  BeginOwn(first, pool);
  if (setup_.streams > 0) {
    graphs_.push_back({.first = dag_.size(), .end = dag_.size()});
    for (uint64_t stream = 1; setup_.forked && stream < setup_.streams; ++stream) {
      Join(StreamOf(stream, pool));
    }
    return;
  }
  // All streams, in branches of the graph of which none is ever behind another: what one of them
  // frees is its own until the capture ends.
  const CaptureDag::Point fork = dag_.At(first);
  for (uint64_t stream = 0; stream < kStreams; ++stream) {
    dag_.Wait(StreamOf(stream, pool), fork);
    dag_.Launch(StreamOf(stream, pool));
  }
}

// A kernel on the stream fills the block, or checks it, when the device comes to it and has done
// what it waits for.
void FuzzSession::Submit(const PoolModel::LiveBlock& live, StreamId stream, bool writes,
                         const Clock& behind) {
  const uint64_t work = watch_.Submit(stream, [=, this, kernel = KernelOf(live, writes)] {
    watch_.Finish(behind);
    if (setup_.map_memory && !kernel.Run()) foreign_ = live.label;
  });
  if (writes) filled_by_[live.label] = {{stream, work}};
}

// As a graph does: it runs before whatever may touch the same bytes.
void FuzzSession::Fill(const PoolModel::LiveBlock& live) {
  // Which waits for those who borrowed.
  for (const auto& [stream, work] : model_.Borrowers(live.pool)) watch_.Finish(stream, work);
  if (setup_.map_memory) KernelOf(live, /*writes=*/true).Run();
  filled_by_[live.label] = {};
}

// A restore has brought the block back. Whoever goes on with an eager one has waited for what was
// at work on its bytes; one of a graph holds what that leaves there, unless that work is still to
// come.
void FuzzSession::Refill(const PoolModel::LiveBlock& live) {
  if (live.eager) return Submit(live, live.block.stream, /*writes=*/true, watch_.TakeMark());
  watch_.Submit(live.block.stream);
  filled_by_.erase(live.label);
  if (live.inherited.empty()) Fill(live);
}

void FuzzSession::Read(const PoolModel::LiveBlock& live) {
  if (model_.AnyAway(live)) return;
  if (!watch_.Accessible(live.block.address, live.block.bytes)) {
    Complain("block b", live.label, " is live but no longer mapped");
  }
  const auto filled = filled_by_.find(live.label);
  const bool checked =
      setup_.map_memory && filled != filled_by_.end() && watch_.Passed(filled->second);
  const bool right = !checked || KernelOf(live, /*writes=*/false).Run();
  if (!right) Complain("block b", live.label, " holds foreign data");
}

void FuzzSession::EndGraph() {
  events_.clear();
  relied_on_.clear();
  unseen_.clear();
  graphs_.back().end = dag_.size();
  for (auto& [item, tensor] : tensors_) {
    if (graphs_.back().failed) tensor.written = false;
    tensor.capture = kNoCapture;
    tensor.behind.clear();
    tensor.reads.clear();
    tensor.unsaid.clear();
  }
}

void FuzzSession::DoInGraph(const Step& step) {
  const StreamId stream = StreamOf(step.stream, graph_pool_);
  const Step::Kind kind = step.kind;
  if (kind == kRead || kind == kReadUnsaid) return Touch(step, /*writes=*/false, kind == kRead);
  if (kind == kWrite || kind == kWriteUnsaid) return Touch(step, /*writes=*/true, kind == kWrite);
  if (kind == kBeginOwn) return BeginOwn(stream, graph_pool_);
  if (kind == kEndOwn) return EndOwn(stream);
  if (kind == kInvalidate && dag_.IsCaptured(stream)) {
    dag_.Invalidate(dag_.At(stream).capture);
    graphs_.back().failed = true;
  } else if (kind == kLaunch || kind == kLaunchEarly) {
    if (!Join(stream)) return;
    if (kind == kLaunchEarly) Settle(stream);
    dag_.Launch(stream, std::nullopt, kind == kLaunchEarly);
  } else if (kind == kRecord) {
    if (dag_.IsCaptured(stream)) events_[step.item] = dag_.At(stream);
  } else if (kind == kWait || kind == kWaitEarly) {
    const auto event = events_.find(step.item);
    if (event == events_.end()) return;
    CaptureDag::Point point = event->second;
    if (kind == kWaitEarly) point.waits = false;
    if (dag_.IsCapturing(stream) && dag_.At(stream).capture != point.capture) return;
    if (!point.waits && dag_.IsCaptured(stream)) Settle(stream);
    dag_.Wait(stream, point);
  } else if (kind == kNextGraph) {
    End(graph_pool_);
    if (own_world_ && step.amount == 1) Sleep(graph_pool_, /*keeps_live=*/true);
    if (own_world_ && step.amount == 2) TrimToNeeds(graph_pool_);
    Begin(graph_pool_, ScopeKind::kCapture);
  }
}

// Graphs that share a pool run one after the other.
void FuzzSession::Execute() {
  constexpr int kRounds = 10;
  for (int round = 0; round < kRounds && !graphs_.empty(); ++round) {
    // All as they were captured; or in any order those that have nothing to do with each other.
    const bool in_order = round % 2 == 0;
    for (size_t place = 0; place < graphs_.size(); ++place) {
      const size_t i = in_order ? place : random_() % graphs_.size();
      const Graph& graph = graphs_[i];
      if (graph.failed || (!in_order && !graph.alone)) continue;
      // What earlier ones left where nothing lives may go then.
      if (own_world_ && (!in_order || place == 0)) LeaseBefore(i);
      RunGraph(i);
    }
    for (const auto& [item, tensor] : tensors_) {
      if (in_order && tensor.written && !Kernel{tensor.block, tensor.word, false}.Run()) {
        Complain("wrong data after the graphs in block ", item);
      }
    }
  }
}

// The pool sleeps, or lends: then the graph is refused, or leaves alone what was borrowed.
void FuzzSession::LeaseBefore(size_t graph) {
  const PoolId id = graph_pool_;
  const StreamId stream = StreamOf(setup_.streams, id);
  if (model_.Graphs(id).size() != graphs_.size()) return;
  if (const uint64_t name = graph % 2 == 0 ? set_.NameCapture(id) : 0) model_.Name(id, name);
  const uint64_t choice = random_() % 4;
  if (choice == 0) {
    Sleep(id, /*keeps_live=*/true);
    Replay(id, stream, graph);
    Wake(id);
  } else if (choice == 1) {
    const PoolId loan = set_.BeginLoan(id);
    const StreamId borrower = StreamOf(0, id);
    std::vector<Kernel> borrowed;
    try {
      while (borrowed.size() < 5) {
        const uint64_t bytes = setup_.page_bytes * (1 + random_() % 4) / 2;
        borrowed.push_back({set_.Allocate(loan, bytes, borrower), random_() | 1, /*writes=*/true});
        borrowed.back().Run();
      }
    } catch (const OutOfMemoryError&) {
    }
    watch_.MarkUsed();
    Follow(id);
    if (Replay(id, stream, graph)) RunGraph(graph);
    watch_.Submit(borrower);
    for (Kernel& kernel : borrowed) {
      kernel.writes = false;
      if (!kernel.Run()) Complain("a graph has overwritten what was borrowed");
      set_.Free(kernel.block.address);
    }
    set_.EndScope(loan);
    Follow(id);
    if (!Replay(id, stream, graph)) Complain("a graph is refused after the loan");
    Sleep(id, /*keeps_live=*/true);  // which ends the loan: the model knows nothing of its blocks
    Wake(id);
    set_.ResetPeaks({});
    most_ = {};
    CompareStats();
  }
  if (!Replay(id, stream, graph)) Complain("a graph is refused whose pool is whole");
}

void FuzzSession::RunGraph(size_t graph) {
  const auto& [first, end, failed, alone] = graphs_[graph];
  const std::optional<Node> wrong = dag_.Run(first, end, dag_.SomeUrgency(first, end, random_));
  if (wrong) Complain("wrong data in graph ", graph, " at its node ", *wrong - first);
}

// Whether the block may be freed now; its stream has waited for all that it must, then.
bool FuzzSession::ReadyToFree(uint64_t label) {
  const Tensor& tensor = tensors_.at(label);
  const StreamId home = tensor.block.stream;
  std::vector<Node> unsaid;
  for (const auto& [stream, node] : tensor.unsaid) {
    if (!LiveOf(label)->uses.contains(stream)) unsaid.push_back(node);
  }
  // Its stream cannot wait any more for what it left with the capture.
  if (!unsaid.empty() && std::ranges::count(captures_[graph_pool_], tensor.capture) == 0)
    return false;
  // Where another capture allocates nothing the pool is not told of it: what its graph uses must
  // not be freed while that lives.
  if (tensor.capture != kNoCapture && !model_.IsTold(graph_pool_, tensor.capture)) return false;
  if (!unsaid.empty() && dag_.IsCaptured(home)) {
    Order(home, unsaid);
    std::ranges::move(unsaid, std::back_inserter(relied_on_[home]));
  }
  return true;
}

void FuzzSession::Touch(const Step& step, bool writes, bool said) {
  const StreamId stream = StreamOf(step.stream, graph_pool_);
  const auto found = tensors_.find(step.item);
  if (found == tensors_.end() || !Join(stream)) return;
  Tensor& tensor = found->second;
  const StreamId home = tensor.block.stream;
  // What is not said must be waited for by the block's stream, in the same capture.
  if (!said && stream != home && !Join(home)) return;
  const CaptureId capture = dag_.At(stream).capture;
  // The home of a block of an earlier graph may take no part in this one.
  if (dag_.IsCapturing(home) && dag_.At(home).capture != capture) return;
  if (tensor.capture != kNoCapture && tensor.capture != capture) return;
  tensor.capture = capture;
  if (tensor.graph + 1 != graphs_.size()) {
    graphs_[tensor.graph].alone = graphs_.back().alone = false;
  }
  std::vector<Node> behind = tensor.behind;
  if (writes) behind.insert(behind.end(), tensor.reads.begin(), tensor.reads.end());
  Order(stream, behind);
  if (stream != home && said) RecordUse(step);
  std::optional<Node> node;
  if (tensor.written) node = dag_.Launch(stream, Kernel{tensor.block, tensor.word, false});
  if (writes) {
    tensor.word = random_();
    tensor.written = true;
    node = dag_.Launch(stream, Kernel{tensor.block, tensor.word, true});
    tensor.behind = {*node};
    tensor.reads.clear();
  } else if (node) {
    tensor.reads.push_back(*node);
  }
  if (node && stream != home && !said) tensor.unsaid[stream] = *node;
}

void FuzzSession::EndOwn(StreamId stream) {
  const CaptureId capture = dag_.At(stream).capture;
  if (!dag_.IsCaptured(stream) || capture == captures_[graph_pool_].front()) return;
  for (uint64_t number = 0; number < setup_.streams; ++number) {
    const StreamId other = StreamOf(number, graph_pool_);
    if (other != stream && dag_.At(other).capture == capture) return;
  }
  dag_.End(capture);
  std::erase(captures_[graph_pool_], capture);
  std::erase_if(events_, [&](const auto& event) { return event.second.capture == capture; });
  relied_on_.erase(stream);
}

void FuzzSession::Order(StreamId stream, std::vector<Node> nodes) {
  if (dag_.RunsBehind(stream, nodes)) return;
  // A stream that waits for a programmatic event waits for nothing else before it has launched
  // something.
  if (!dag_.At(stream).waits) dag_.Launch(stream);
  std::erase_if(nodes, [&](Node node) { return dag_.RunsBehind(stream, {node}); });
  dag_.Wait(stream, {.capture = dag_.At(stream).capture, .nodes = std::move(nodes)});
}

void FuzzSession::CompareFrontiers() {
  for (uint64_t number = 0; number <= setup_.streams; ++number) {
    const StreamId stream = StreamOf(number, graph_pool_);
    Frontier told;
    host_.Capture(stream, &told);
    const Frontier expected = dag_.IsCaptured(stream) ? dag_.ToHost(dag_.At(stream)) : Frontier{};
    if (told.capture != expected.capture || told.waits != expected.waits ||
        !std::ranges::is_permutation(told.nodes, expected.nodes)) {
      Complain("the host driver tells something else of stream ", number);
    }
  }
}

}  // namespace cgp
