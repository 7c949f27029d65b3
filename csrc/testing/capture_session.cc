#include "testing/capture_session.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <thread>
#include <utility>

#include "core/base/error.h"
#include "testing/text.h"

namespace cgp {
namespace {

using Kind = Step::Kind;

constexpr uint64_t kMostStreams = 100;

}  // namespace

CaptureSession::CaptureSession(const CaptureSetup& setup, World* shared, uint64_t number)
    : setup_(setup),
      own_world_(shared ? nullptr
                        : std::make_unique<World>(HostDriverOptions{.granularity = 4096},
                                                  setup.page_bytes)),
      world_(shared ? *shared : *own_world_),
      pool_{number, 1},
      origin_{kMostStreams * number},
      bystander_(StreamOf(setup.streams)),
      model_(watch_, dag_, setup.page_bytes),
      random_(setup.seed) {
  BeginGraph();
}

std::string CaptureSession::Run(const Step& step) {
  std::string complaint;
  try {
    complaint = Do(step);
    if (complaint.empty()) complaint = CompareFrontiers();
  } catch (const std::exception& error) {
    complaint = Text("unexpected exception: ", error.what());
  }
  if (complaint.empty() && !watch_.violations().empty()) {
    complaint = "driver.h is broken: " + watch_.violations().front();
  }
  return complaint;
}

std::string CaptureSession::Finish() {
  try {
    EndGraph();
    std::string complaint = Execute();
    if (complaint.empty()) complaint = TidyUp();
    return complaint;
  } catch (const std::exception& error) {
    return Text("unexpected exception at the end: ", error.what());
  }
}

std::string CaptureSession::Do(const Step& step) {
  const StreamId stream = StreamOf(step.stream);
  if (step.stream > setup_.streams) return {};
  if (stream == bystander_ && step.kind != Kind::kUse) return {};
  switch (step.kind) {
    case Kind::kAllocate:
      return Allocate(step.item, step.amount, stream);
    case Kind::kFree:
      return Free(step.item);
    case Kind::kRead:
    case Kind::kReadUnsaid:
      return Touch(step.item, stream, /*writes=*/false, step.kind == Kind::kRead);
    case Kind::kWrite:
    case Kind::kWriteUnsaid:
      return Touch(step.item, stream, /*writes=*/true, step.kind == Kind::kWrite);
    case Kind::kUse:
      RecordUse(step.item, stream);
      return {};
    case Kind::kLaunch:
    case Kind::kLaunchEarly:
      if (!Join(stream)) return {};
      if (step.kind == Kind::kLaunchEarly) Settle(stream);
      Launch(stream, std::nullopt, step.kind == Kind::kLaunchEarly);
      return {};
    case Kind::kRecord:
      if (Captured(stream)) events_[step.item] = dag_.At(stream);
      return {};
    case Kind::kWait:
    case Kind::kWaitEarly: {
      const auto event = events_.find(step.item);
      if (event == events_.end()) return {};
      CaptureDag::Point point = event->second;
      if (step.kind == Kind::kWaitEarly) point.waits = false;
      if (Capturing(stream) && dag_.At(stream).capture != point.capture) return {};
      if (!point.waits && Captured(stream)) Settle(stream);
      Wait(stream, point);
      return {};
    }
    case Kind::kBeginOwn:
      BeginOwn(stream);
      return {};
    case Kind::kEndOwn:
      EndOwn(stream);
      return {};
    case Kind::kInvalidate:
      Invalidate(stream);
      return {};
    case Kind::kProgress:
      for (const StreamId at_work : {bystander_, stream}) watch_.Progress(at_work, 1);
      return {};
    case Kind::kNextGraph:
      EndGraph();
      BeginGraph();
      return {};
    default:
      return {};
  }
}

void CaptureSession::Call(const std::function<void()>& call) {
  if (!setup_.fail_each) return call();
  world_.FailEach(++calls_ % 2 == 0 ? FaultKind::kDriverCall : FaultKind::kAllocation, call);
}

void CaptureSession::CallOf(uint64_t item, const std::function<void()>& call) {
  if (!IsOthers(item)) return Call(call);
  std::exception_ptr error;
  std::thread([&] {
    try {
      Call(call);
    } catch (...) {
      error = std::current_exception();
    }
  }).join();
  if (error) std::rethrow_exception(error);
}

void CaptureSession::BeginGraph() {
  const bool may_mark = watch_.MayQuiesce();
  Call([&] { set_.BeginScope(pool_, ScopeKind::kCapture); });
  model_.BeginScope(pool_, ScopeKind::kCapture, may_mark);
  watch_.set_capturing(true);
  graphs_.push_back({.first = dag_.size(), .end = dag_.size()});
  BeginOwn(origin_);
  for (uint64_t stream = 1; setup_.forked && stream < setup_.streams; ++stream) {
    Join(StreamOf(stream));
  }
}

void CaptureSession::EndGraph() {
  // As torch does it: the captures end first, then the scope.
  for (const CaptureId capture : captures_) host_.graphs().End(capture);
  captures_.clear();
  invalid_.clear();
  events_.clear();
  relied_on_.clear();
  dag_.EndCaptures();
  Call([&] { set_.EndScope(pool_); });
  unseen_.clear();
  model_.EndScope(pool_, /*may_mark=*/false);
  graphs_.back().end = dag_.size();
  for (auto& [item, tensor] : live_) {
    if (graphs_.back().failed) tensor.written = false;
    tensor.capture = kNoCapture;
    tensor.behind.clear();
    tensor.reads.clear();
    tensor.unsaid.clear();
  }
  watch_.set_capturing(false);
  set_.Check();
}

// Graphs that share a pool run one after the other.
std::string CaptureSession::Execute() {
  constexpr int kRounds = 10;
  for (int round = 0; round < kRounds; ++round) {
    // Those of the last graphs that do not run leave to the first ones what was there a round before.
    const size_t count = round % 2 == 0 ? graphs_.size() : random_() % graphs_.size();
    for (size_t i = 0; i < count; ++i) {
      const Graph& graph = graphs_[i];
      if (graph.failed) continue;
      const std::vector<uint64_t> urgency = dag_.SomeUrgency(graph.first, graph.end, random_);
      const std::optional<Node> wrong = dag_.Run(graph.first, graph.end, urgency);
      if (wrong) return Text("wrong data in graph ", i, " at its node ", *wrong - graph.first);
    }
    for (const auto& [item, tensor] : live_) {
      if (count == graphs_.size() && tensor.written &&
          !Kernel{tensor.block, tensor.word, false}.Run()) {
        return Text("wrong data after the graphs in block ", item);
      }
    }
  }
  return {};
}

std::string CaptureSession::TidyUp() {
  for (const auto& entry : live_) {
    Call([&] { set_.Free(entry.second.block.address); });
  }
  live_.clear();
  for (size_t i = 0; i < graphs_.size(); ++i) {
    Call([&] { set_.Release(pool_); });
  }
  if (own_world_ == nullptr) return {};
  set_.Trim();
  if (!watch_.violations().empty()) return "driver.h is broken: " + watch_.violations().front();
  if (host_.usage() != HostUsage{} || watch_.events() != 0)
    return "something is left in the driver";
  return {};
}

std::string CaptureSession::Allocate(uint64_t item, uint64_t bytes, StreamId stream) {
  if (bytes == 0 || !known_.insert(item).second) return {};
  if (!Capturing(stream)) Join(stream);
  if (!Capturing(stream)) return {};
  for (const StreamId user : std::exchange(unseen_, {})) model_.See(pool_, user);
  model_.Ask(pool_, stream);
  const CaptureId in = Captured(stream) ? dag_.At(stream).capture : kNoCapture;
  Tensor tensor;
  Call([&] { tensor.block = set_.Allocate(pool_, bytes, stream, in); });
  watch_.MarkUsed();
  tensor.word = random_();
  tensor.capture = dag_.At(stream).capture;
  tensor.behind = dag_.At(stream).nodes;
  const uint64_t pages = set_.Stats(pool_).pages;
  std::string complaint;
  if (pages > model_.Pages(pool_) && tensor.block.bytes < setup_.page_bytes) {
    ++growths_judged_;
    if (model_.NeedOf(pool_, bytes, stream).least_new() == 0) {
      complaint = Text("the pool grew for a block of ", bytes, " bytes that a page has room for");
    }
  }
  if (complaint.empty()) {
    complaint = model_.Place(item, pool_, tensor.block, set_.Pieces(tensor.block.address), pages);
  }
  live_.emplace(item, std::move(tensor));
  return complaint;
}

std::string CaptureSession::Free(uint64_t item) {
  const auto found = live_.find(item);
  if (found == live_.end()) return {};
  Tensor& tensor = found->second;
  std::vector<Node> unsaid;
  for (const auto& [stream, node] : tensor.unsaid) {
    if (!model_.LiveAt(tensor.block.address)->uses.contains(stream)) unsaid.push_back(node);
  }
  // Its stream cannot wait any more for what it left with the capture.
  if (!unsaid.empty() && std::ranges::find(captures_, tensor.capture) == captures_.end()) return {};
  // Where another capture allocates nothing the pool is not told of it: what its graph uses must not
  // be freed while that lives.
  if (tensor.capture != kNoCapture && !model_.IsTold(pool_, tensor.capture)) return {};
  if (!unsaid.empty() && Captured(tensor.block.stream)) {
    Order(tensor.block.stream, unsaid);
    std::ranges::move(unsaid, std::back_inserter(relied_on_[tensor.block.stream]));
  }
  CallOf(item, [&] { set_.Free(tensor.block.address); });
  model_.Free(tensor.block.address, tensor.capture, !IsOthers(item));
  live_.erase(found);
  return {};
}

std::string CaptureSession::Touch(uint64_t item, StreamId stream, bool writes, bool said) {
  const auto found = live_.find(item);
  if (found == live_.end() || !Join(stream)) return {};
  Tensor& tensor = found->second;
  const StreamId home = tensor.block.stream;
  // What is not said must be waited for by the block's stream, in the same capture.
  if (!said && stream != home && !Join(home)) return {};
  const CaptureId capture = dag_.At(stream).capture;
  // The home of a block of an earlier graph may take no part in this one.
  if (Capturing(home) && dag_.At(home).capture != capture) return {};
  if (tensor.capture != kNoCapture && tensor.capture != capture) return {};
  tensor.capture = capture;
  std::vector<Node> behind = tensor.behind;
  if (writes) behind.insert(behind.end(), tensor.reads.begin(), tensor.reads.end());
  Order(stream, behind);
  if (stream != home && said) RecordUse(item, stream);
  std::optional<Node> node;
  if (tensor.written) node = Launch(stream, Kernel{tensor.block, tensor.word, false}, false);
  if (writes) {
    tensor.word = random_();
    tensor.written = true;
    node = Launch(stream, Kernel{tensor.block, tensor.word, true}, false);
    tensor.behind = {*node};
    tensor.reads.clear();
  } else if (node) {
    tensor.reads.push_back(*node);
  }
  if (node && stream != home && !said) tensor.unsaid[stream] = *node;
  return {};
}

void CaptureSession::RecordUse(uint64_t item, StreamId stream) {
  const auto found = live_.find(item);
  if (found == live_.end()) return;
  const bool by_another = stream != found->second.block.stream;
  if (by_another && IsOthers(item)) {
    unseen_.push_back(stream);
  } else if (by_another) {
    model_.See(pool_, stream);
  }
  CallOf(item, [&] { set_.RecordUse(found->second.block.address, stream); });
  model_.RecordUse(found->second.block.address, stream);
  if (by_another && !Capturing(stream)) watch_.Submit(stream);
}

void CaptureSession::BeginOwn(StreamId stream) {
  if (Capturing(stream)) return;
  captures_.push_back(host_.graphs().Begin(stream));
  dag_.Begin(stream, captures_.back());
  model_.BeginCapture(pool_, captures_.back());
}

void CaptureSession::EndOwn(StreamId stream) {
  const CaptureId capture = dag_.At(stream).capture;
  if (!Captured(stream) || capture == captures_.front()) return;
  for (uint64_t other = 0; other < setup_.streams; ++other) {
    if (StreamOf(other) != stream && dag_.At(StreamOf(other)).capture == capture) return;
  }
  host_.graphs().End(capture);
  dag_.End(capture);
  std::erase(captures_, capture);
  std::erase_if(events_, [&](const auto& event) { return event.second.capture == capture; });
  relied_on_.erase(stream);
}

void CaptureSession::Invalidate(StreamId stream) {
  if (!Captured(stream)) return;
  const CaptureId capture = dag_.At(stream).capture;
  host_.graphs().Invalidate(capture);
  model_.Invalidate(capture);
  invalid_.insert(capture);
  graphs_.back().failed = true;
}

bool CaptureSession::Captured(StreamId stream) const {
  const CaptureId capture = dag_.At(stream).capture;
  return capture != kNoCapture && !invalid_.contains(capture);
}

bool CaptureSession::Join(StreamId stream) {
  if (!Capturing(stream)) Wait(stream, dag_.At(origin_));
  return Captured(stream);
}

CaptureSession::Node CaptureSession::Launch(StreamId stream, const std::optional<Kernel>& kernel,
                                            bool early) {
  host_nodes_.push_back(host_.graphs().Launch(
      stream, early ? HostGraphs::LaunchKind::kProgrammatic : HostGraphs::LaunchKind::kPlain));
  return dag_.Launch(stream, kernel, early);
}

void CaptureSession::Wait(StreamId stream, const CaptureDag::Point& point) {
  if (invalid_.contains(point.capture)) return;
  host_.graphs().Wait(stream, ToHost(point));
  dag_.Wait(stream, point);
}

void CaptureSession::Order(StreamId stream, std::vector<Node> nodes) {
  if (dag_.RunsBehind(stream, nodes)) return;
  // A stream that waits for a programmatic event waits for nothing else before it has launched
  // something.
  if (!dag_.At(stream).waits) Launch(stream, std::nullopt, /*early=*/false);
  std::erase_if(nodes, [&](Node node) { return dag_.RunsBehind(stream, {node}); });
  Wait(stream, {.capture = dag_.At(stream).capture, .nodes = std::move(nodes)});
}

void CaptureSession::Settle(StreamId stream) {
  if (!dag_.LastRunsBehind(stream, relied_on_[stream])) {
    Launch(stream, std::nullopt, /*early=*/false);
  }
}

Frontier CaptureSession::ToHost(const CaptureDag::Point& point) const {
  Frontier frontier{.capture = point.capture, .nodes = {}, .waits = point.waits};
  for (const Node node : point.nodes) frontier.nodes.push_back(host_nodes_[node]);
  return frontier;
}

std::string CaptureSession::CompareFrontiers() {
  for (uint64_t stream = 0; stream <= setup_.streams; ++stream) {
    Frontier told;
    host_.Capture(StreamOf(stream), &told);
    const CaptureDag::Point point = dag_.At(StreamOf(stream));
    const Frontier expected = Captured(StreamOf(stream)) ? ToHost(point) : Frontier{};
    if (told.capture != expected.capture || told.waits != expected.waits ||
        !std::ranges::is_permutation(told.nodes, expected.nodes)) {
      return Text("the host driver tells something else of stream ", stream);
    }
  }
  return {};
}

}  // namespace cgp
