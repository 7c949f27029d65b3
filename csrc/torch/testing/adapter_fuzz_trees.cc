// What torch.compile's graph trees do: they take a checkpoint behind each graph, and go back to it
// to capture another one from there.
#include <unordered_set>

#include "torch/testing/adapter_fuzz_session.h"

namespace cgp::simulated {

std::set<int> Session::LiveIn(const Graph& graph) const {
  std::set<int> live;
  for (const auto& [number, tensor] : tensors_) {
    if (tensor.live && tensor.device == graph.device && tensor.pool == graph.id)
      live.insert(number);
  }
  return live;
}

void Session::CheckLiveIn(const Graph& graph) {
  std::unordered_set<void*> expected;
  for (const int number : LiveIn(graph)) expected.insert(tensors_.at(number).data.get());
  bool same = false;
  const auto ask = [&] {
    same = allocator_.checkPoolLiveAllocations(graph.device, graph.id, expected);
  };
  Call(graph.origin, ask, MayFail::kNothing);
  if (!same) Complain("other blocks live in the pool of graph ", graph.number);
}

// Not of a pool that captures share, which has no name of its own.
void Session::Checkpoint(Graph& graph) {
  if (!graph.ours || CaptureScopes::IsAnonymous(graph.id)) return;
  CheckLiveIn(graph);
  Call(graph.origin,
       [&] { graph.checkpoint = allocator_.getCheckpointState(graph.device, graph.id); });
  if (graph.checkpoint == nullptr) return;
  graph.left = LiveIn(graph);
  Log("takes a checkpoint behind graph ", graph.number);
}

void Session::Restore() {
  NoteReturned();
  Graph* const graph = SomeGraph([this](const Graph& some) {
    // Another thread's capture that failed may still be ended, for all that is known. One that is
    // under way elsewhere has nothing to do with trees' blocks.
    const auto is_in_the_way = [&](const auto& other) {
      if (other->state == Graph::State::kGone) {
        return other->id == some.id && other->thread != thread_;
      }
      return other->open() && std::ranges::any_of(other->blocks, [&](int number) {
               const Tensor& tensor = tensors_.at(number);
               return tensor.device == some.device && tensor.pool == some.id;
             });
    };
    return some.checkpoint != nullptr && some.holds_pool && !IsFilled(some.device, some.id) &&
           !IsLent(some.left) && std::ranges::none_of(graphs_, is_in_the_way);
  });
  if (graph == nullptr) return;
  std::vector<Tensor*> stale;
  for (const int number : LiveIn(*graph)) {
    Tensor& tensor = tensors_.at(number);
    if (graph->left.contains(number)) continue;
    if (dice_.OneIn(2)) {
      Free(tensor);
    } else {
      stale.push_back(&tensor);
    }
  }
  Log("restores the pool of graph ", graph->number);
  cca::CheckpointDelta delta;
  const auto restore = [&] {
    delta = allocator_.setCheckpointPoolState(graph->device, graph->checkpoint);
  };
  if (!Call(graph->origin, restore) && !Call(graph->origin, restore, MayFail::kNothing)) {
    if (LacksMemory(*graph)) return;
    return Complain("cannot be restored: the pool of graph ", graph->number);
  }
  NoteReturned();  // a pool that slept is awake
  for (Tensor* tensor : stale) {
    Forget(*tensor);
    tensor->data.release_context();
  }
  for (DataPtr& data : delta.dataptrs_allocd) {
    const auto number = std::ranges::find_if(graph->left, [&](int one) {
      return tensors_.at(one).block.address == reinterpret_cast<Address>(data.get());
    });
    if (number == graph->left.end()) return Complain("a block came back that had not lived");
    Tensor& tensor = tensors_.at(*number);
    if (tensor.live) {
      data.release_context();
      continue;
    }
    tensor.live = true;
    tensor.data = std::move(data);
    // Its graph has been replayed, behind all that there was.
    Join(&tensor.last, timelines.TakeMark());
  }
  if (LiveIn(*graph) != graph->left) Complain("a block did not come back");
  CheckLiveIn(*graph);
  // Those that died since.
  for (const int number : graph->left) {
    if (tensors_.at(number).live && dice_.OneIn(4)) Free(tensors_.at(number));
  }
}

}  // namespace cgp::simulated
