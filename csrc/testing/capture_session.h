// A program over captured streams, run on the real pool set: captured in the host driver's graphs,
// judged at each step by the oracle, and its graphs executed on real memory in many orders.
//
// The program is right by construction: a stream waits before it touches what another one touched,
// and says so with RecordUse() or makes the block's stream wait before the free. So whatever finds
// other data than was written is the pool's fault.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "testing/capture_dag.h"
#include "testing/capture_program.h"
#include "testing/pool_model.h"
#include "testing/step.h"
#include "testing/world.h"

namespace cgp {

class CaptureSession {
 public:
  using Setup = CaptureSetup;

  // In a world of its own, or in one that it shares with others, each of which has another number and may have a
  // thread of its own: they have pools and streams of their own.
  explicit CaptureSession(const CaptureSetup& setup, World* shared = nullptr, uint64_t number = 0);

  // Both return what is wrong, or nothing. Finish() ends the capture and executes the graphs.
  std::string Run(const Step& step);
  std::string Finish();

  const PoolModel& model() const { return model_; }
  uint64_t growths_judged() const { return growths_judged_; }

 private:
  using Node = CaptureDag::Node;

  struct Tensor {
    Block block;
    uint64_t word = 0;
    bool written = false;
    // In the open scope: the capture that touched it, what each access must run behind, and what a write must, too.
    CaptureId capture = kNoCapture;
    std::vector<Node> behind;
    std::vector<Node> reads;
    std::map<StreamId, Node> unsaid;  // the last access of each stream that was not recorded
  };
  // One scope's nodes, [first, end).
  struct Graph {
    Node first = 0;
    Node end = 0;
    bool failed = false;
  };

  void BeginGraph();
  void EndGraph();
  std::string Execute();
  // Frees all, and returns what is left in the driver that should not be.
  std::string TidyUp();
  std::string Allocate(uint64_t item, uint64_t bytes, StreamId stream);
  std::string Free(uint64_t item);
  std::string Touch(uint64_t item, StreamId stream, bool writes, bool said);
  void RecordUse(uint64_t item, StreamId stream);
  void BeginOwn(StreamId stream);
  void EndOwn(StreamId stream);
  void Invalidate(StreamId stream);
  std::string Do(const Step& step);
  // Makes the call, which fails before in every way it can, if the setup says so.
  void Call(const std::function<void()>& call);
  // The same, with what frees or uses this block.
  void CallOf(uint64_t item, const std::function<void()>& call);
  bool IsOthers(uint64_t item) const { return setup_.threads && item % 2 == 1; }

  StreamId StreamOf(uint64_t stream) const {
    return StreamId{static_cast<uint64_t>(origin_) + stream};
  }
  bool Capturing(StreamId stream) const { return dag_.At(stream).capture != kNoCapture; }
  bool Captured(StreamId stream) const;
  // Makes the stream part of the scope's first capture, if it is part of none; returns whether it
  // can launch something.
  bool Join(StreamId stream);
  Node Launch(StreamId stream, const std::optional<Kernel>& kernel, bool early);
  void Wait(StreamId stream, const CaptureDag::Point& point);
  // Makes the stream wait for what it does not run behind already.
  void Order(StreamId stream, std::vector<Node> nodes);
  // Before what does not wait is launched on the stream: something that waits for all that the
  // frees of its blocks have relied on, and that the bytes it was given stand behind.
  void Settle(StreamId stream);
  Frontier ToHost(const CaptureDag::Point& point) const;
  // Whether the host driver tells of the stream what the program did.
  std::string CompareFrontiers();

  const CaptureSetup setup_;
  std::unique_ptr<World> own_world_;
  World& world_;
  HostDriver& host_ = world_.host;
  DriverWatch& watch_ = world_.watch;
  PoolSet& set_ = *world_.set;
  const PoolId pool_;
  const StreamId origin_;
  const StreamId bystander_;  // is never captured
  CaptureDag dag_;
  PoolModel model_;
  std::mt19937_64 random_;

  std::unordered_map<uint64_t, Tensor> live_;
  std::vector<StreamId> unseen_;  // whose uses other threads recorded since the last allocation
  std::set<uint64_t> known_;      // every block that there ever was
  std::map<uint64_t, CaptureDag::Point> events_;
  std::vector<GraphNode> host_nodes_;                // by node
  std::map<StreamId, std::vector<Node>> relied_on_;  // see Settle()
  std::vector<CaptureId> captures_;  // of the open scope; the first is that which streams join
  std::set<CaptureId> invalid_;
  std::vector<Graph> graphs_;
  uint64_t calls_ = 0;
  uint64_t growths_judged_ = 0;
};

}  // namespace cgp
