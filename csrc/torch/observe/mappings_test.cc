// What the history is told of mappings.
#include <gtest/gtest.h>

#include <memory>
#include <thread>
#include <vector>

#include "driver/metered_driver.h"
#include "testing/host_driver.h"
#include "torch/observe/history.h"
#include "torch/testing/fake_cuda.h"

namespace cgp {
namespace {

using fake_cuda::kPage;
using Action = History::Action;

class MappingsTest : public ::testing::Test {
 protected:
  void SetUp() override { Record(true); }
  void TearDown() override { Record(false); }
  static void Record(bool enabled) {
    History::Get().Configure(enabled, nullptr, 100, History::When::NEVER, true, {});
  }
  std::vector<History::TraceEntry> Noted() const {
    std::vector<std::vector<History::TraceEntry>> traces(static_cast<size_t>(device_) + 1);
    History::Get().MergeInto(traces);
    return traces[static_cast<size_t>(device_)];
  }

  const c10::DeviceIndex device_ = fake_cuda::NextDevice();
  MeteredDriver driver_{
      std::make_unique<HostDriver>(HostDriverOptions{.device = device_, .map_memory = false}),
      &History::Mapped};
};

TEST_F(MappingsTest, MappingsAreNotedForThePoolAndStreamOfTheThread) {
  const Address address = driver_.Reserve(3 * kPage);
  const Handle handle = driver_.Create(kPage);
  {
    const History::Purpose purpose({5, 6}, StreamId{7});
    driver_.Map(address, kPage, handle);
    std::thread([&] { driver_.Map(address + kPage, kPage, handle); }).join();
  }
  driver_.Map(address + 2 * kPage, kPage, handle);
  EXPECT_THROW(driver_.Map(address, kPage, handle), DriverError);
  driver_.Unmap(address, kPage);
  EXPECT_THROW(driver_.Unmap(address, kPage), DriverError);

  const auto noted = Noted();
  ASSERT_EQ(noted.size(), 4U) << "what failed is not noted";
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(noted[i].action_, i < 3 ? Action::SEGMENT_MAP : Action::SEGMENT_UNMAP);
    EXPECT_EQ(noted[i].addr_, address + i % 3 * kPage);
    EXPECT_EQ(noted[i].size_, kPage);
    EXPECT_EQ(noted[i].mempool_, i == 0 ? c10::MempoolId_t(5, 6) : c10::MempoolId_t(0, 0));
    EXPECT_EQ(noted[i].stream_, reinterpret_cast<void*>(i == 0 ? 7 : 0));
  }
}

}  // namespace
}  // namespace cgp
