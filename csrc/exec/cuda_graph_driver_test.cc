// Executables over CUDA functions that are made up. cuda_graph_kind_test.cc asks what graphs are
// alike.
#include "exec/cuda_graph_driver.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "driver/cuda_driver_test_cuda.h"

namespace cgp {
namespace {

using namespace made_up_cuda;

class CudaGraphDriverTest : public CudaDriverTest {
 protected:
  Graph graph() { return Graph{reinterpret_cast<uintptr_t>(&graph_)}; }

  FakeGraph graph_{.nodes = {FakeNode{}}, .edges = {}};
  CudaGraphDriver::Refused refused_ = 0;
  const GraphExec exec_{reinterpret_cast<uintptr_t>(kExec)};
};

TEST_F(CudaGraphDriverTest, InstantiatesAsTorchDoes) {
  CudaGraphDriver driver(0, api_, refused_);
  EXPECT_EQ(driver.Instantiate(graph()), exec_);
  EXPECT_EQ(fake_.graph, ToCuda(&graph_));
  // AUTO_FREE_ON_LAUNCH and USE_NODE_PRIORITY, and not UPLOAD nor DEVICE_LAUNCH.
  EXPECT_EQ(fake_.instantiate_flags, 1u | 8u);
}

TEST_F(CudaGraphDriverTest, UpdatesUploadsAndDestroysWhatItIsTold) {
  CudaGraphDriver driver(0, api_, refused_);
  EXPECT_TRUE(driver.Update(exec_, graph()));
  EXPECT_EQ(fake_.exec, kExec);
  EXPECT_EQ(fake_.graph, ToCuda(&graph_));
  fake_.exec = nullptr;
  driver.Upload(exec_, kStream);
  EXPECT_EQ(fake_.exec, kExec);
  EXPECT_EQ(fake_.stream, reinterpret_cast<CUstream>(0x5000));
  fake_.exec = nullptr;
  driver.Destroy(exec_);
  EXPECT_EQ(fake_.exec, kExec);
}

TEST_F(CudaGraphDriverTest, ARefusalIsNoError) {
  CudaGraphDriver driver(0, api_, refused_);
  fake_.failing = {{"cuGraphExecUpdate", CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE}};
  EXPECT_FALSE(driver.Update(exec_, graph()));
  EXPECT_TRUE(contexts.empty());
  EXPECT_EQ(capture_mode, CU_STREAM_CAPTURE_MODE_GLOBAL);
  fake_.failing.clear();
  EXPECT_TRUE(driver.Update(exec_, graph()));
}

TEST_F(CudaGraphDriverTest, EachErrorOfCudaIsThrownWithCallCodeAndDevice) {
  CudaGraphDriver driver(0, api_, refused_);
  const std::vector<std::pair<std::string, std::function<void()>>> calls = {
      {"cuGraphInstantiateWithFlags", [&] { driver.Instantiate(graph()); }},
      {"cuGraphExecUpdate", [&] { driver.Update(exec_, graph()); }},
      {"cuGraphUpload", [&] { driver.Upload(exec_, kStream); }},
  };
  for (const auto& [function, call] : calls) {
    const DriverError memory = Failing(function, CUDA_ERROR_OUT_OF_MEMORY, call);
    EXPECT_EQ(memory.status(), DriverStatus::kOutOfMemory) << function;
    EXPECT_EQ(memory.device(), 0);
    EXPECT_NE(std::string(memory.what()).find("CUDA_ERROR_OUT_OF_MEMORY (2)"), std::string::npos);
    const DriverError other = Failing(function, CUDA_ERROR_INVALID_VALUE, call);
    EXPECT_EQ(other.status(), DriverStatus::kFailed) << function;
    EXPECT_NE(std::string(other.what()).find("CUDA_ERROR_INVALID_VALUE (1)"), std::string::npos);
  }
  Failing("cuDevicePrimaryCtxRetain", CUDA_ERROR_OUT_OF_MEMORY, [&] {
    CudaGraphDriver another(0, api_, refused_);
    another.Instantiate(graph());
  });
}

TEST_F(CudaGraphDriverTest, LeavesTheThreadsContextAndCaptureModeAsTheyWere) {
  CudaGraphDriver driver(0, api_, refused_);
  const std::vector<std::function<void()>> calls = {
      [&] { driver.KindOf(graph()); },        [&] { driver.Instantiate(graph()); },
      [&] { driver.Update(exec_, graph()); }, [&] { driver.Upload(exec_, kStream); },
      [&] { driver.Destroy(exec_); },
  };
  for (const auto& call : calls) {
    for (const std::vector<CUcontext>& before :
         {std::vector<CUcontext>{}, {kOther}, {kPrimary}, {kPrimary, kOther}}) {
      for (const CUstreamCaptureMode mode :
           {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
            CU_STREAM_CAPTURE_MODE_RELAXED}) {
        contexts = before;
        capture_mode = mode;
        call();
        EXPECT_EQ(contexts, before);
        EXPECT_EQ(capture_mode, mode);
      }
    }
  }
  capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
}

TEST_F(CudaGraphDriverTest, ThrowsWhereThereIsNoSuchDeviceOrNoDriver) {
  Failing("cuInit", CUDA_ERROR_NO_DEVICE, [&] { CudaGraphDriver driver(0, api_, refused_); });
  try {
    CudaGraphDriver driver(2, api_, refused_);
    FAIL();
  } catch (const DriverError& error) {
    EXPECT_EQ(error.call(), "cuDeviceGet");
    EXPECT_EQ(error.device(), 2);
  }
}

}  // namespace
}  // namespace cgp
