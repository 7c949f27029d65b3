#include "core/memory/proofs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <vector>

#include "core/base/error.h"
#include "core/base/units.h"
#include "driver/faulty_driver.h"
#include "testing/host_driver.h"

namespace cgp {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

constexpr StreamId kA{1};
constexpr StreamId kB{2};
constexpr StreamId kC{3};
constexpr FenceId kFence1{1};
constexpr FenceId kFence2{2};
constexpr FenceId kFence7{7};
constexpr std::optional<std::size_t> kNoOwner;

// Three streams of one capture: A began it, B and C wait for its beginning.
class ProofTableTest : public ::testing::Test {
 protected:
  ProofTableTest() : capture_(graphs_.Begin(kA)) {
    Join(kB, kA);
    Join(kC, kA);
  }

  GraphNode Launch(StreamId stream) { return graphs_.Launch(stream); }
  void Join(StreamId stream, StreamId other) { graphs_.Wait(stream, graphs_.Record(other)); }
  std::size_t AddStream() { return proofs_.AddStream(capture_); }
  void Add(FenceId fence, std::vector<GraphNode> nodes,
           std::optional<std::size_t> owner = std::nullopt) {
    proofs_.Add(fence, capture_, nodes, owner);
  }
  std::vector<FenceId> Advance(std::size_t number, StreamId stream) {
    return Advance(number, graphs_.Record(stream));
  }
  std::vector<FenceId> Advance(std::size_t number, const Frontier& frontier) {
    const auto proven = proofs_.Advance(number, frontier);
    const std::vector<FenceId> told(proven.begin(), proven.end());
    proofs_.HandOver(number);
    return told;
  }

  HostDriver host_{{.granularity = 4096, .map_memory = false}};
  FaultyDriver driver_{host_};
  HostGraphs& graphs_ = host_.graphs();
  const CaptureId capture_;
  ProofTable proofs_{driver_};
};

TEST_F(ProofTableTest, StreamsAreNumberedAsTheyAreAdded) {
  EXPECT_EQ(proofs_.stream_count(), 0u);
  EXPECT_EQ(proofs_.AddStream(5), 0u);
  EXPECT_EQ(proofs_.AddStream(kNoCapture), 1u);
  EXPECT_EQ(proofs_.stream_count(), 2u);
  EXPECT_EQ(proofs_.capture(0), 5u);
  EXPECT_EQ(proofs_.capture(1), kNoCapture);
}

TEST_F(ProofTableTest, AFenceIsProvenToAStreamThatReachesItsNode) {
  const std::size_t b = AddStream();
  const GraphNode node = Launch(kA);
  Add(kFence1, {node});
  EXPECT_TRUE(proofs_.Contains(kFence1));
  EXPECT_FALSE(proofs_.IsProven(kFence1, b));
  EXPECT_THAT(Advance(b, kB), IsEmpty());
  Join(kB, kA);
  EXPECT_THAT(Advance(b, kB), ElementsAre(kFence1));
  EXPECT_TRUE(proofs_.IsProven(kFence1, b));
  EXPECT_THAT(Advance(b, kB), IsEmpty()) << "it is news once";
  EXPECT_TRUE(proofs_.Contains(kFence1));
}

TEST_F(ProofTableTest, WhatTheOthersCaptureAfterTheFreeDoesNotMatter) {
  const std::size_t b = AddStream();
  const GraphNode node = Launch(kA);
  const Frontier at_free = graphs_.Record(kA);
  Add(kFence1, {node});
  Launch(kA);
  graphs_.Wait(kB, at_free);
  EXPECT_THAT(Advance(b, kB), ElementsAre(kFence1));
}

TEST_F(ProofTableTest, ToItsOwnerAFenceIsProvenAtOnce) {
  const std::size_t a = AddStream();
  const std::size_t b = AddStream();
  const GraphNode node = Launch(kA);
  Add(kFence1, {node}, a);
  EXPECT_TRUE(proofs_.IsProven(kFence1, a));
  EXPECT_FALSE(proofs_.IsProven(kFence1, b));
  EXPECT_THAT(Advance(a, kA), IsEmpty()) << "nothing new to it";
  Join(kB, kA);
  EXPECT_THAT(Advance(b, kB), ElementsAre(kFence1));
}

TEST_F(ProofTableTest, AFenceBehindWhatAStreamHasReachedIsProvenAtOnce) {
  const std::size_t a = AddStream();
  const std::size_t b = AddStream();
  const GraphNode node = Launch(kA);
  Launch(kA);
  Advance(a, kA);
  Add(kFence1, {node});
  EXPECT_TRUE(proofs_.IsProven(kFence1, a));
  EXPECT_FALSE(proofs_.IsProven(kFence1, b));
  Launch(kA);
  EXPECT_THAT(Advance(a, kA), IsEmpty());
}

// In whatever order they are reached.
TEST_F(ProofTableTest, AllNodesOfAFenceMustBeReached) {
  for (const std::vector<StreamId>& order :
       {std::vector{kA, kB, kC}, {kA, kC, kB}, {kB, kA, kC}, {kC, kB, kA}}) {
    proofs_.Clear();
    constexpr StreamId kAsking{4};
    graphs_.Wait(kAsking, Frontier{.capture = capture_, .nodes = {}});
    const std::size_t asking = AddStream();
    Add(kFence1, {Launch(kA), Launch(kB), Launch(kC)});
    for (std::size_t i = 0; i < 2; ++i) {
      Join(kAsking, order[i]);
      EXPECT_THAT(Advance(asking, kAsking), IsEmpty());
      EXPECT_FALSE(proofs_.IsProven(kFence1, asking));
    }
    Join(kAsking, order[2]);
    EXPECT_THAT(Advance(asking, kAsking), ElementsAre(kFence1));
  }
}

TEST_F(ProofTableTest, NodesReachedAtOnceProveAllThatWaitsForThem) {
  const std::size_t c = AddStream();
  const GraphNode a = Launch(kA);
  const GraphNode b = Launch(kB);
  const GraphNode b2 = Launch(kB);
  Add(kFence1, {a, b});
  Add(kFence2, {a});
  Add(FenceId{3}, {b, a});
  Add(FenceId{4}, {b2, a});
  Join(kA, kB);
  Launch(kA);
  Launch(kA);
  Join(kC, kA);
  EXPECT_THAT(Advance(c, kC), UnorderedElementsAre(kFence1, kFence2, FenceId{3}, FenceId{4}));
}

TEST_F(ProofTableTest, AStreamThatIsAddedLaterIsToldOfEarlierFences) {
  const std::size_t a = AddStream();
  const GraphNode node = Launch(kA);
  const GraphNode other = Launch(kB);
  Add(kFence1, {node}, a);
  Add(kFence7, {other, node});
  const std::size_t b = AddStream();
  EXPECT_FALSE(proofs_.IsProven(kFence1, b));
  EXPECT_THAT(Advance(b, kB), IsEmpty());
  Join(kB, kA);
  EXPECT_THAT(Advance(b, kB), UnorderedElementsAre(kFence1, kFence7));
}

TEST_F(ProofTableTest, EachStreamHasItsOwnProof) {
  const std::size_t b = AddStream();
  const std::size_t c = AddStream();
  Add(kFence1, {Launch(kA)});
  Join(kB, kA);
  EXPECT_THAT(Advance(b, kB), ElementsAre(kFence1));
  EXPECT_THAT(Advance(c, kC), IsEmpty());
  EXPECT_TRUE(proofs_.IsProven(kFence1, b));
  EXPECT_FALSE(proofs_.IsProven(kFence1, c));
  Join(kC, kB);
  EXPECT_THAT(Advance(c, kC), ElementsAre(kFence1));
}

TEST_F(ProofTableTest, AStreamOfAnotherCaptureIsNeverProvenAnything) {
  constexpr StreamId kOther{9};
  const CaptureId other_capture = graphs_.Begin(kOther);
  const std::size_t other = proofs_.AddStream(other_capture);
  const std::size_t outside = proofs_.AddStream(kNoCapture);
  Add(kFence1, {Launch(kA)});
  graphs_.Launch(kOther);
  EXPECT_THAT(Advance(other, kOther), IsEmpty());
  EXPECT_THAT(Advance(outside, Frontier{}), IsEmpty());
  EXPECT_FALSE(proofs_.IsProven(kFence1, other));
  EXPECT_FALSE(proofs_.IsProven(kFence1, outside));
}

// The graph may not even order what it had reached as its frontier.
TEST_F(ProofTableTest, AStreamBehindAProgrammaticEdgeIsProvenOnlyWhatItOwns) {
  const std::size_t a = AddStream();
  const std::size_t b = AddStream();
  const GraphNode node = Launch(kB);
  Add(kFence1, {node}, b);
  Add(kFence2, {Launch(kA)}, a);
  Join(kA, kB);
  EXPECT_THAT(Advance(a, kA), ElementsAre(kFence1));
  EXPECT_FALSE(proofs_.must_forfeit(a));
  graphs_.Launch(kA, HostGraphs::LaunchKind::kProgrammatic);
  EXPECT_THAT(Advance(a, kA), IsEmpty());
  EXPECT_TRUE(proofs_.must_forfeit(a)) << "it may own what was proven to it";
  EXPECT_FALSE(proofs_.must_forfeit(b));
  EXPECT_FALSE(proofs_.IsProven(kFence1, a));
  EXPECT_TRUE(proofs_.IsProven(kFence2, a));
  Add(kFence7, {node});
  EXPECT_FALSE(proofs_.IsProven(kFence7, a));
  Launch(kA);
  EXPECT_THAT(Advance(a, kA), IsEmpty());
}

TEST_F(ProofTableTest, AStreamForfeitsWhatItOwnsAndIsTold) {
  const std::size_t a = AddStream();
  const std::size_t b = AddStream();
  const std::vector node{Launch(kA)};
  Add(kFence1, node, a);
  Join(kB, kA);
  Advance(b, kB);
  proofs_.NoteGrowth(a);  // so it refuses B the next
  Add(kFence2, node, a);
  Add(kFence7, {Launch(kC)});
  Join(kB, kC);
  EXPECT_THAT(proofs_.Advance(b, graphs_.Record(kB)), ElementsAre(kFence7)) << "not handed over";
  Add(FenceId{3}, node, b);
  Add(FenceId{5}, {Launch(kB)}, b);
  const Frontier before = graphs_.Record(kB);
  graphs_.Launch(kB, HostGraphs::LaunchKind::kProgrammatic);
  proofs_.Advance(b, graphs_.Record(kB));
  EXPECT_TRUE(proofs_.IsProven(FenceId{3}, b));
  proofs_.Forfeit(b);
  EXPECT_FALSE(proofs_.must_forfeit(b));
  EXPECT_FALSE(proofs_.IsProven(FenceId{3}, b));
  EXPECT_EQ(proofs_.LastLike(capture_, node, b), std::nullopt);
  Add(FenceId{4}, node, b);
  EXPECT_TRUE(proofs_.IsProven(FenceId{4}, b)) << "it came to own that later";
  graphs_.Wait(kA, before);
  EXPECT_THAT(Advance(a, kA), Contains(FenceId{5})) << "it receives, and lends again";
  EXPECT_THAT(Advance(b, kB), IsEmpty());
}

// Only a stream to which something was proven can own what is not its own by its order alone.
TEST_F(ProofTableTest, AStreamThatWasProvenNothingForfeitsNothing) {
  const std::size_t a = AddStream();
  Add(kFence1, {Launch(kA)}, a);
  graphs_.Launch(kA, HostGraphs::LaunchKind::kProgrammatic);
  EXPECT_THAT(Advance(a, kA), IsEmpty());
  EXPECT_FALSE(proofs_.must_forfeit(a));
  EXPECT_TRUE(proofs_.IsProven(kFence1, a));
}

// A lends to B, until it had to make the pool grow meanwhile: then not before it gets something back.
TEST_F(ProofTableTest, AStreamThatMadeThePoolGrowLendsNoMoreBeforeItReceives) {
  const std::size_t a = AddStream();
  const std::size_t b = AddStream();
  proofs_.NoteGrowth(a);
  Add(kFence1, {Launch(kA)}, a);
  Join(kB, kA);
  EXPECT_THAT(Advance(b, kB), ElementsAre(kFence1)) << "it had lent nothing before it grew";
  proofs_.NoteGrowth(a);
  const GraphNode later = Launch(kA);
  Add(kFence2, {later}, a);
  Join(kB, kA);
  EXPECT_THAT(Advance(b, kB), IsEmpty());
  EXPECT_TRUE(proofs_.IsProven(kFence2, b));
  EXPECT_FALSE(proofs_.IsLent(kFence2, b));
  EXPECT_TRUE(proofs_.IsLent(kFence2, a));
  Add(FenceId{3}, {later}, a);
  EXPECT_FALSE(proofs_.IsLent(FenceId{3}, b)) << "nor what is proven as soon as it is freed";
  Add(FenceId{4}, {later});
  EXPECT_TRUE(proofs_.IsLent(FenceId{4}, b)) << "nobody's own";

  Add(kFence7, {Launch(kB)}, b);
  Join(kA, kB);
  EXPECT_THAT(Advance(a, kA), UnorderedElementsAre(kFence7, FenceId{4}));
  EXPECT_THAT(Advance(b, kB), UnorderedElementsAre(kFence2, FenceId{3}));
}

TEST_F(ProofTableTest, LastLikeIsTheFenceAddedLastIfItIsLikeThat) {
  const std::size_t a = AddStream();
  const GraphNode first = Launch(kA);
  const GraphNode second = Launch(kA);
  const std::vector both{first, second};
  const std::vector one{first};
  const std::vector others{first, Launch(kA)};
  EXPECT_EQ(proofs_.LastLike(capture_, one, kNoOwner), std::nullopt);
  Add(kFence1, both);
  EXPECT_EQ(proofs_.LastLike(capture_, both, kNoOwner), kFence1);
  EXPECT_EQ(proofs_.LastLike(capture_, one, kNoOwner), std::nullopt);
  EXPECT_EQ(proofs_.LastLike(capture_, others, kNoOwner), std::nullopt);
  EXPECT_EQ(proofs_.LastLike(capture_, both, a), std::nullopt) << "to A it would be proven";
  Add(kFence2, both, a);
  EXPECT_EQ(proofs_.LastLike(capture_, both, a), kFence2);
  EXPECT_EQ(proofs_.LastLike(capture_, both, kNoOwner), std::nullopt) << "to A it is proven";
  EXPECT_EQ(proofs_.LastLike(capture_, both, a + 1), std::nullopt);
  proofs_.Clear();
  EXPECT_EQ(proofs_.LastLike(capture_, both, a), std::nullopt);
}

TEST_F(ProofTableTest, ContainsWhatWasAddedSinceTheLastClear) {
  EXPECT_FALSE(proofs_.Contains(FenceId::kOpen));
  EXPECT_FALSE(proofs_.Contains(kFence1));
  const GraphNode node = Launch(kA);
  Add(kFence7, {node});
  EXPECT_TRUE(proofs_.Contains(kFence7));
  for (const FenceId fence : {FenceId::kOpen, kFence1, FenceId{6}, FenceId{8}}) {
    EXPECT_FALSE(proofs_.Contains(fence));
  }
  EXPECT_THROW(Add(kFence7, {node}), InternalError);
  EXPECT_THROW(Add(kFence1, {}), InternalError);
  proofs_.Clear();
  EXPECT_FALSE(proofs_.Contains(kFence7));
  EXPECT_EQ(proofs_.stream_count(), 0u);
  const std::size_t b = AddStream();
  Add(kFence7, {node});
  Join(kB, kA);
  EXPECT_THAT(Advance(b, kB), ElementsAre(kFence7)) << "nothing of the old capture is in the way";
}

TEST_F(ProofTableTest, AFailingDriverLosesNoFence) {
  const std::size_t c = AddStream();
  Add(kFence1, {Launch(kA), Launch(kB)});
  Add(kFence2, {Launch(kA)});
  for (const StreamId stream : {kA, kB}) {
    Launch(stream);
    Join(kC, stream);
  }
  for (const uint64_t call : {1u, 2u, 1u}) {  // of two: what a call has said is not asked again
    driver_.Arm({.call_number = call, .only = DriverCall::kDependencies});
    EXPECT_THROW(Advance(c, kC), DriverError);
    EXPECT_FALSE(proofs_.IsProven(kFence1, c));
    EXPECT_FALSE(proofs_.IsProven(kFence2, c));
  }
  driver_.Disarm();
  EXPECT_THAT(Advance(c, kC), UnorderedElementsAre(kFence1, kFence2));
}

// Each node is asked once, however many fences wait and however often a stream asks.
TEST_F(ProofTableTest, AsksEachNodeOnceOnly) {
  const std::size_t b = AddStream();
  const std::size_t c = AddStream();
  constexpr uint32_t kNodes = 2000;
  std::size_t proven = 0;
  for (uint32_t i = 1; i <= kNodes; ++i) {
    const GraphNode node = Launch(kA);
    Add(FenceId{i}, {node});
    if (i % 7 == 0) Join(kB, kA);
    if (i % 100 == 0) Join(kC, kA);
    proven += Advance(b, kB).size();
    proven += Advance(c, kC).size();
  }
  EXPECT_EQ(proven, kNodes / 7 * 7 + kNodes);
  EXPECT_EQ(driver_.call_count(), kNodes);
}

// Random programs against a model that keeps, for each node, all that comes before it.
class ProofsAgainstModel : public ProofTableTest, public ::testing::WithParamInterface<uint32_t> {
 protected:
  // With streams to which it is proven, and of these: to which it is not lent; to which it is, as
  // the next Advance() must tell.
  struct Fence {
    std::vector<GraphNode> nodes;
    std::optional<std::size_t> owner;
    std::set<std::size_t> proven;
    std::set<std::size_t> refused;
    std::set<std::size_t> untold;
  };

  uint32_t Below(std::size_t limit) { return static_cast<uint32_t>(random_() % limit); }
  StreamId AnyStream() { return StreamId{1 + Below(kStreams)}; }

  void LaunchSomewhere() {
    const StreamId stream = AnyStream();
    const Frontier frontier = graphs_.Record(stream);
    before_[Launch(stream)] = Closure(frontier);
  }

  std::set<GraphNode> Closure(const Frontier& frontier) {
    std::set<GraphNode> closure;
    for (const GraphNode node : frontier.nodes) {
      closure.insert(node);
      closure.insert(before_[node].begin(), before_[node].end());
    }
    return closure;
  }

  bool IsProven(const Fence& fence, std::size_t number) {
    return fence.owner == number || std::ranges::all_of(fence.nodes, [&](GraphNode node) {
             return reached_[number].contains(node);
           });
  }

  void AddSomeFence() {
    Fence fence;
    const uint32_t streams = 1 + Below(3);
    for (uint32_t i = 0; i < streams; ++i) {
      for (const GraphNode node : graphs_.Record(AnyStream()).nodes) {
        if (std::ranges::find(fence.nodes, node) == fence.nodes.end()) fence.nodes.push_back(node);
      }
    }
    if (fence.nodes.empty()) return;
    if (streams == 1 && !numbers_.empty()) fence.owner = Below(numbers_.size());
    const FenceId id{1 + 3 * static_cast<uint32_t>(fences_.size())};
    proofs_.Add(id, capture_, fence.nodes, fence.owner);
    for (std::size_t s = 0; s < numbers_.size(); ++s) {
      if (!IsProven(fence, s)) continue;
      Prove(fence, s);
      fence.untold.clear();
      ASSERT_EQ(proofs_.IsLent(id, s), !fence.refused.contains(s));
    }
    fences_[id] = fence;
  }

  // The fence has come to be proven to the stream.
  void Prove(Fence& fence, std::size_t s) {
    fence.proven.insert(s);
    fence.untold.insert(s);
    if (!fence.owner || fence.owner == s) return;
    for (auto& [id, other] : fences_) {
      if (other.owner == s && other.refused.erase(*fence.owner)) other.untold.insert(*fence.owner);
    }
    lent_since_.erase({s, *fence.owner});
    const auto [lent, is_first] = lent_since_.try_emplace({*fence.owner, s}, ++clock_);
    if (is_first || grew_[*fence.owner] < lent->second) return;
    fence.refused.insert(s);
    fence.untold.erase(s);
  }

  void GrowSome() {
    if (numbers_.empty()) return;
    const std::size_t s = Below(numbers_.size());
    proofs_.NoteGrowth(s);
    grew_[s] = ++clock_;
  }

  void AdvanceSome() {
    const StreamId stream = AnyStream();
    if (std::ranges::find(numbers_, stream) == numbers_.end()) {
      ASSERT_EQ(AddStream(), numbers_.size());
      numbers_.push_back(stream);
    }
    const auto number =
        static_cast<std::size_t>(std::ranges::find(numbers_, stream) - numbers_.begin());
    const Frontier frontier = graphs_.Record(stream);
    reached_[number].merge(Closure(frontier));
    for (auto& [id, fence] : fences_) {
      if (!fence.proven.contains(number) && IsProven(fence, number)) Prove(fence, number);
    }
    for (const FenceId fence : Advance(number, frontier)) {
      ASSERT_TRUE(fences_[fence].untold.erase(number)) << "told twice, or refused";
    }
    for (auto& [id, fence] : fences_) ASSERT_FALSE(fence.untold.contains(number)) << "not told";
  }

  void ExpectAsModel() {
    for (const auto& [id, fence] : fences_) {
      for (std::size_t s = 0; s < numbers_.size(); ++s) {
        ASSERT_EQ(proofs_.IsProven(id, s), IsProven(fence, s));
      }
    }
  }

  static constexpr uint32_t kStreams = 5;
  std::mt19937 random_{GetParam()};
  std::map<GraphNode, std::set<GraphNode>> before_;
  std::map<FenceId, Fence> fences_;
  std::vector<StreamId> numbers_;  // by the number of the stream in the table
  std::map<std::size_t, std::set<GraphNode>> reached_;
  uint64_t clock_ = 0;
  std::map<std::pair<std::size_t, std::size_t>, uint64_t> lent_since_;  // owner and borrower
  std::map<std::size_t, uint64_t> grew_;                                // when last
};

TEST_P(ProofsAgainstModel, RandomPrograms) {
  for (uint32_t s = 4; s <= kStreams; ++s) Join(StreamId{s}, kA);
  for (int step = 0; step < 400; ++step) {
    const uint32_t choice = Below(10);
    if (choice < 4) {
      LaunchSomewhere();
    } else if (choice < 6) {
      AddSomeFence();
    } else if (choice < 7) {
      Join(AnyStream(), AnyStream());
      if (Below(4) == 0) GrowSome();
    } else {
      AdvanceSome();
      if (!HasFatalFailure()) ExpectAsModel();
    }
    if (HasFatalFailure()) FAIL() << "at step " << step;
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, ProofsAgainstModel, ::testing::Range(0u, 20u));

}  // namespace
}  // namespace cgp
