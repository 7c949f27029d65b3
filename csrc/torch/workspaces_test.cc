#include "torch/workspaces.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <set>

#include "torch/testing/fake_cuda.h"

namespace cgp {
namespace {

using fake_cuda::lt_workspaces;
using fake_cuda::workspaces;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

constexpr uintptr_t kStream = 100;
constexpr uintptr_t kOther = 200;

std::set<uintptr_t> alive;

at::DataPtr Memory(uintptr_t address) {
  alive.insert(address);
  void* const plain = reinterpret_cast<void*>(address);
  return {plain, plain, [](void* at) { alive.erase(reinterpret_cast<uintptr_t>(at)); },
          at::Device(at::kCUDA, 0)};
}

[[maybe_unused]] void Set(at::DataPtr& workspace, at::DataPtr data) { workspace = std::move(data); }
[[maybe_unused]] void Set(SizedWorkspace& workspace, at::DataPtr data) {
  workspace = {std::move(data), 4096};
}

class WorkspacesTest : public ::testing::Test {
 protected:
  using Held = std::optional<std::vector<std::shared_ptr<Workspace>>>;

  // What a product does on a stream that has none.
  void Make(uintptr_t address, uintptr_t stream, uintptr_t handle = 1,
            WorkspaceMap& map = workspaces) {
    Set(map.map[{reinterpret_cast<void*>(handle), reinterpret_cast<void*>(stream)}],
        Memory(address));
  }
  // What a graph of 2.12 to 2.14 does when it goes.
  static void Clear(uintptr_t stream) {
    for (WorkspaceMap* const map : {&workspaces, &lt_workspaces}) {
      std::erase_if(map->map, [&](const auto& entry) {
        return std::get<1>(entry.first) == reinterpret_cast<void*>(stream);
      });
    }
  }
  void TearDown() override {
    Clear(kStream);
    Clear(kOther);
    EXPECT_THAT(alive, IsEmpty());
  }
};

TEST_F(WorkspacesTest, LiveAsLongAsAGraphHoldsThem) {
  Make(0x1000, kStream);
  Make(0x2000, kStream, 1, lt_workspaces);
  Make(0x3000, kOther);
  Held one = HoldWorkspaces(kStream), other = HoldWorkspaces(kStream);
  EXPECT_EQ(one->size(), 2u);
  EXPECT_EQ(BlasWorkspaces().size(), 3u);
  one.reset();
  Clear(kStream);
  EXPECT_THAT(alive, UnorderedElementsAre(0x1000, 0x2000, 0x3000));
  other.reset();
  EXPECT_THAT(alive, ElementsAre(0x3000));
}

TEST_F(WorkspacesTest, WhoCapturesNextFindsWhatIsHeld) {
  Make(0x1000, kStream);
  Held held = HoldWorkspaces(kStream);
  Clear(kStream);
  EXPECT_THAT(BlasWorkspaces(), IsEmpty());
  HoldWorkspaces(kOther);
  EXPECT_THAT(BlasWorkspaces(), IsEmpty()) << "another stream's";
  HoldWorkspaces(kStream);
  EXPECT_THAT(BlasWorkspaces(), ElementsAre(std::tuple(0x1000, 4096, kStream)));
  held.reset();
  EXPECT_THAT(alive, ElementsAre(0x1000)) << "the map's again";
  held = HoldWorkspaces(kStream);
  Clear(kStream);
  EXPECT_THAT(alive, ElementsAre(0x1000));
}

TEST_F(WorkspacesTest, ANewOneIsHeldBesideTheOld) {
  Make(0x1000, kStream);
  const Held old = HoldWorkspaces(kStream);
  Clear(kStream);
  Make(0x2000, kStream);  // a product came first
  Held held = HoldWorkspaces(kStream);
  EXPECT_THAT(BlasWorkspaces(), ElementsAre(std::tuple(0x2000, 4096, kStream)));
  Clear(kStream);
  EXPECT_THAT(alive, UnorderedElementsAre(0x1000, 0x2000));
  HoldWorkspaces(kStream);
  EXPECT_THAT(BlasWorkspaces(), ElementsAre(std::tuple(0x2000, 4096, kStream))) << "the newest";
}

TEST_F(WorkspacesTest, EachThreadHasItsOwn) {
  Make(0x1000, kStream, 1);
  Make(0x2000, kStream, 2);
  const Held held = HoldWorkspaces(kStream);
  Clear(kStream);
  EXPECT_THAT(alive, UnorderedElementsAre(0x1000, 0x2000));
  HoldWorkspaces(kStream);
  EXPECT_EQ(BlasWorkspaces().size(), 2u);
}

}  // namespace
}  // namespace cgp
