#include "core/memory/proofs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "core/base/error.h"
#include "core/base/units.h"
#include "testing/host_driver.h"
#include "testing/test_names.h"

namespace cgp {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

constexpr FenceId kFence1{1};
constexpr FenceId kFence2{2};
constexpr FenceId kFence7{7};

// Streams of one capture: A began it, B waits for its beginning.
class ProofTableTest : public ::testing::Test {
 protected:
  ProofTableTest() : capture_(graphs_.Begin(kA)) { Join(kB, kA); }

  GraphNode Launch(StreamId stream) { return graphs_.Launch(stream); }
  void Join(StreamId stream, StreamId other) { graphs_.Wait(stream, graphs_.Record(other)); }
  std::size_t AddStream() { return proofs_.AddStream(capture_); }
  void Add(FenceId fence, std::vector<GraphNode> nodes,
           std::optional<std::size_t> owner = std::nullopt) {
    proofs_.Add(fence, capture_, nodes, owner);
  }
  std::vector<FenceId> Advance(std::size_t number, StreamId stream) {
    const auto proven = proofs_.Advance(number, graphs_.Record(stream));
    const std::vector<FenceId> told(proven.begin(), proven.end());
    proofs_.HandOver(number);
    return told;
  }

  HostDriver host_{{.granularity = 4096, .map_memory = false}};
  HostGraphs& graphs_ = host_.graphs();
  const CaptureId capture_;
  ProofTable proofs_{host_};
};

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

// A leases to B, until it had to make the pool grow meanwhile: then not before it gets something
// back.
TEST_F(ProofTableTest, AStreamThatMadeThePoolGrowLendsNoMoreBeforeItReceives) {
  const std::size_t a = AddStream();
  const std::size_t b = AddStream();
  proofs_.NoteGrowth(a);
  Add(kFence1, {Launch(kA)}, a);
  Join(kB, kA);
  EXPECT_THAT(Advance(b, kB), ElementsAre(kFence1)) << "it had leased nothing before it grew";
  proofs_.NoteGrowth(a);
  const GraphNode later = Launch(kA);
  Add(kFence2, {later}, a);
  Join(kB, kA);
  EXPECT_THAT(Advance(b, kB), IsEmpty());
  EXPECT_TRUE(proofs_.IsProven(kFence2, b));
  EXPECT_FALSE(proofs_.IsLeased(kFence2, b));
  EXPECT_TRUE(proofs_.IsLeased(kFence2, a));
  Add(FenceId{3}, {later}, a);
  EXPECT_FALSE(proofs_.IsLeased(FenceId{3}, b)) << "nor what is proven as soon as it is freed";
  Add(FenceId{4}, {later});
  EXPECT_TRUE(proofs_.IsLeased(FenceId{4}, b)) << "nobody's own";

  Add(kFence7, {Launch(kB)}, b);
  Join(kA, kB);
  EXPECT_THAT(Advance(a, kA), UnorderedElementsAre(kFence7, FenceId{4}));
  EXPECT_THAT(Advance(b, kB), UnorderedElementsAre(kFence2, FenceId{3}));
}

}  // namespace
}  // namespace cgp
