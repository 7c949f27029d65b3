// Pools that sleep, wake, lend and are trimmed, as cudagraph_pool's Python tells the adapter. A
// replay asks first, as torch.cuda.CUDAGraph.replay() does from the first lease on.
#include "torch/testing/adapter_fuzz_session.h"

namespace cgp::simulated {
namespace {

bool IsLoan(const MempoolId_t& id) {
  const PoolId of_shared = PoolSet::LoanOf(CaptureScopes::kShared);
  if (id == MempoolId_t{of_shared.first, of_shared.second}) return true;
  return id.first >> 63 == 1 && id.first != CaptureScopes::kShared.first;
}

}  // namespace

bool Session::IsBorrowed(const Tensor& tensor) { return IsLoan(tensor.pool); }

std::pair<DeviceIndex, MempoolId_t> Session::SomePool() {
  const Graph* const graph =
      SomeGraph([](const Graph& some) { return some.holds_pool && some.replayable; });
  if (graph != nullptr && !dice_.OneIn(3)) return {graph->device, graph->id};
  if (!mempools_.empty() && (ids_.empty() || dice_.OneIn(3))) return dice_.Of(mempools_);
  return {Device(), ids_.empty() ? MempoolId_t{0, 0} : dice_.Of(ids_)};
}

// What a pool gives away is in nobody's use, and live blocks stay where they are.
void Session::TakePages(const char* what, const CaptureScopes::Step& step) {
  const auto [device, id] = SomePool();
  if (id == MempoolId_t{0, 0}) return;
  NoteReturned();
  std::vector<Access> under_way;
  std::ranges::copy_if(accesses_, std::back_inserter(under_way), [](const Access& access) {
    return !timelines.Passed({{access.stream, access.count}});
  });
  Log("pool ", id.first, ",", id.second, " ", what);
  const auto entry = [&, device = device, id = id] { allocator_.scopes().Take(device, id, step); };
  Call(StreamOf(device, 0), entry);
  for (auto& [number, tensor] : tensors_) {
    const Pieces now = drivers.at(tensor.device)->Below(tensor.block.address, tensor.block.bytes);
    if (now == tensor.pieces) continue;
    if (tensor.live) Complain("lives, but is mapped otherwise: block ", number);
    const bool is_used = std::ranges::any_of(under_way, [&, number = number](const Access& access) {
      return access.tensor == number && !timelines.Passed({{access.stream, access.count}});
    });
    if (is_used) Complain("went while it was used: block ", number);
    tensor.is_away = true;
  }
}

void Session::Sleep() {
  TakePages("sleeps", [](PoolSet& set, PoolId id) { return set.Sleep(id, /*keeps_live=*/true); });
}

void Session::TrimToNeeds() {
  TakePages("is trimmed", [](PoolSet& set, PoolId id) { return set.TrimToNeeds(id); });
}

void Session::Wake() {
  const auto [device, id] = SomePool();
  if (id == MempoolId_t{0, 0}) return;
  Log("pool ", id.first, ",", id.second, " wakes");
  Call(StreamOf(device, 0),
       [&, device = device, id = id] { allocator_.scopes().Wake(device, id); });
}

// Pages come back as others: what lay in one before lies in one again, and in no other's.
void Session::NoteReturned() {
  std::set<int> needed;
  for (const auto& graph : graphs_) {
    if (!graph->holds_pool) continue;
    needed.insert(graph->blocks.begin(), graph->blocks.end());
    needed.insert(graph->left.begin(), graph->left.end());
  }
  std::map<std::pair<int, Handle>, Handle> anew, before;
  for (const int number : needed) {
    Tensor& tensor = tensors_.at(number);
    const Pieces now = drivers.at(tensor.device)->Below(tensor.block.address, tensor.block.bytes);
    if (!tensor.is_away || now.empty()) continue;
    bool same = now.size() == tensor.pieces.size();
    for (size_t i = 0; same && i < now.size(); ++i) {
      const Piece& was = tensor.pieces[i];
      const Piece& is = now[i];
      same = was.begin == is.begin && was.end == is.end &&
             anew.try_emplace({was.device, was.handle}, is.handle).first->second == is.handle &&
             before.try_emplace({is.device, is.handle}, was.handle).first->second == was.handle;
    }
    if (!same) Complain("came back otherwise: block ", number);
    tensor.pieces = now;
    tensor.is_away = false;
  }
}

// Whole handles are lent, so a block that died may not be able to come back.
bool Session::IsLent(const std::set<int>& blocks) const {
  const auto shares_handle = [&](const Tensor& tensor, const Tensor& borrowed) {
    return std::ranges::any_of(tensor.pieces, [&](const Piece& piece) {
      return std::ranges::any_of(borrowed.pieces, [&](const Piece& other) {
        return piece.device == other.device && piece.handle == other.handle;
      });
    });
  };
  return std::ranges::any_of(tensors_, [&](const auto& entry) {
    return entry.second.live && IsBorrowed(entry.second) &&
           std::ranges::any_of(
               blocks, [&](int block) { return shares_handle(tensors_.at(block), entry.second); });
  });
}

// Whether its pool could not be woken, or the host lacked memory to end its last scope.
bool Session::LacksMemory(const Graph& graph) {
  const PoolId id{graph.id.first, graph.id.second};
  const PoolSet& pools = DevicePools::Find(graph.device)->set;
  return pools.Stats(id).asleep || pools.InScope(id);
}

// Whether the replay may be launched. Then nothing that it overwrites is lent, and work that
// borrowed is over or comes before it.
bool Session::BeginReplay(Graph& graph, StreamId stream) {
  const auto ask = [&] {
    allocator_.scopes().BeginReplay(graph.device, graph.id, graph.name.first, graph.name.second);
  };
  if (!Call(stream, ask)) return false;
  const Clock behind = timelines.Now(stream);
  const auto is_overwritten = [&](const Tensor& tensor) {
    return IsBorrowed(tensor) && !graph.blocks.contains(tensor.number) &&
           std::ranges::any_of(graph.blocks, [&](int block) {
             return Overlap(tensors_.at(block).pieces, tensor.pieces);
           });
  };
  for (const auto& [number, tensor] : tensors_) {
    if (tensor.live && is_overwritten(tensor)) {
      Complain("replays over a borrowed block: graph ", graph.number, ", block ", number);
    }
  }
  for (const Access& access : accesses_) {
    const auto waited = behind.find(access.stream);
    const bool comes_before = waited != behind.end() && waited->second >= access.count;
    if (comes_before || timelines.Passed({{access.stream, access.count}})) continue;
    if (is_overwritten(tensors_.at(access.tensor))) {
      Complain("a replay does not wait: graph ", graph.number, " for borrowed block ",
               access.tensor, ", operation ", access.count, " on ", access.stream);
    }
  }
  return true;
}

void Session::NameCapture(Graph& graph) {
  if (!dice_.OneIn(2)) return;
  const auto name = [&] { graph.name = allocator_.scopes().NameCapture(graph.device, graph.id); };
  Call(graph.origin, name);
}

void Session::DropCapture(Graph& graph) {
  if (graph.name.first == 0) return;
  const PoolId id{graph.id.first, graph.id.second};
  Call(graph.origin, [&] {
    DevicePools* const pools = DevicePools::Find(graph.device);
    if (pools != nullptr) pools->set.DropCapture(id, graph.name.first);
  });
}

void Session::BeginLoan() {
  const auto [device, id] = SomePool();
  const bool is_in_one =
      std::ranges::any_of(scopes_, [this](const Scope& scope) { return scope.thread == thread_; });
  if (id == MempoolId_t{0, 0} || is_in_one || SomeOpen() != nullptr) return;
  Scope scope{.thread = thread_, .device = device, .ours = true, .is_loan = true};
  const auto begin = [&, id = id] {
    const PoolId loan = allocator_.scopes().BeginLoan(scope.device, id);
    scope.id = {loan.first, loan.second};
  };
  if (!Call(StreamOf(device, 0), begin)) return;
  Log("borrows from pool ", id.first, ",", id.second);
  scopes_.push_back(scope);
  for (uint64_t few = dice_.Below(4); few > 0; --few) {
    Allocate();
    if (dice_.OneIn(2)) Free();
    if (dice_.OneIn(2)) Replay();
  }
}

void Session::EndLoan(const Scope& scope) {
  Log("borrows no more, in ", scope.id.first, ",", scope.id.second);
  Call(StreamOf(scope.device, 0), [&] {
    allocator_.scopes().EndLoan(scope.device, {scope.id.first, scope.id.second});
  });
}

}  // namespace cgp::simulated
