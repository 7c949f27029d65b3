// The model is given what a broken pool would do in captures, and has to say so. (That it lets pass
// what is right, the fuzzer shows.)
#include "testing/pool_model.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <string>

#include "testing/host_driver.h"
#include "testing/test_names.h"

namespace cgp {
namespace {

using ::testing::HasSubstr;

// Blocks come and go at the start of pages, in a scope with two streams.
class PoolModelTest : public ::testing::Test {
 protected:
  PoolModelTest() {
    model_.BeginScope(kPool, ScopeKind::kCapture, /*may_mark=*/true);
    Begin(kA);
    dag_.Wait(kB, dag_.At(kA));
    Launch(kA);
    Launch(kB);
    model_.Ask(kPool, kA);
    model_.Ask(kPool, kB);
  }

  void Begin(StreamId stream) {
    model_.BeginCapture(kPool, dag_.Begin(stream));
    Launch(stream);
  }
  void Launch(StreamId stream) { dag_.Launch(stream); }
  std::string Place(StreamId stream, uint32_t page, uint64_t bytes = kPage) {
    pages_ = std::max<uint64_t>(pages_, page + 1);
    const Block block{++label_ * kPage, bytes, bytes, stream};
    address_of_[page] = block.address;
    return model_.Place(label_, kPool, block, {{PageId{page}, 0, bytes}}, pages_);
  }
  void Free(uint32_t page) { model_.Free(address_of_[page]); }

  HostDriver host_{{.map_memory = false}};
  DriverWatch watch_{host_};
  CaptureDag dag_{host_.graphs()};
  PoolModel model_{watch_, dag_, kPage};
  uint64_t pages_ = 0;
  uint64_t label_ = 0;
  Address address_of_[8] = {};
};

TEST_F(PoolModelTest, WhoMayNotTakeBytesIsNamed) {
  Begin(kC);
  for (uint32_t page = 0; page < 4; ++page) EXPECT_EQ(Place(kA, page), "");
  EXPECT_THAT(Place(kB, 0), HasSubstr("held by block b1"));
  Free(1);
  EXPECT_THAT(Place(kC, 1), HasSubstr("may not be taken")) << "of another capture";
  model_.RecordUse(address_of_[2], kB);
  Free(2);
  EXPECT_THAT(Place(kA, 2), HasSubstr("and used by others"));
  Free(3);
  dag_.Wait(kB, dag_.At(kA));
  dag_.Launch(kB, std::nullopt, /*programmatic=*/true);
  EXPECT_THAT(Place(kB, 3), HasSubstr("may not be taken yet: freed on stream 1"))
      << "a programmatic edge stands for nothing";
}

}  // namespace
}  // namespace cgp
