#include "torch/runtime.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <atomic>
#include <stdexcept>
#include <string>

#include "driver/cuda_driver.h"
#include "torch/workspaces.h"

namespace cgp {
namespace {

std::atomic<bool> exports{false};

}  // namespace

std::optional<CaptureId> CaptureOf(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  CaptureId id = 0;
  // Built with CUDA 13's headers, this passes null for all other arguments, which CUDA 12's own
  // form does not take.
  if (cudaStreamGetCaptureInfo(stream, &status, &id) == cudaSuccess) {
    return status == cudaStreamCaptureStatusActive ? std::optional(id) : std::nullopt;
  }
  // The legacy stream cannot be asked while a blocking stream captures, and never captures itself.
  (void)cudaGetLastError();
  return std::nullopt;
}

bool IsCapturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) == cudaSuccess) {
    return status != cudaStreamCaptureStatusNone;
  }
  (void)cudaGetLastError();  // as above
  return false;
}

cudaStream_t CurrentStream(c10::DeviceIndex device) {
  return c10::cuda::getCurrentCUDAStream(device).stream();
}

bool CurrentStreamLasts(c10::DeviceIndex device) {
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(device);
  // The id of an external stream is the stream itself.
  const auto external = static_cast<c10::StreamId>(reinterpret_cast<uintptr_t>(stream.stream()));
  return stream.stream() == nullptr || stream.id() != external;
}

// A forked process has no CUDA, nor any capture: memory is freed there all the same.
RelaxedCaptureMode::RelaxedCaptureMode()
    : changed_(cudaThreadExchangeStreamCaptureMode(&before_) == cudaSuccess) {
  if (!changed_) (void)cudaGetLastError();
}

RelaxedCaptureMode::~RelaxedCaptureMode() {
  if (changed_) C10_CUDA_CHECK_WARN(cudaThreadExchangeStreamCaptureMode(&before_));
}

c10::DeviceIndex CurrentDevice() {
  c10::DeviceIndex device = 0;
  C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
  return device;
}

bool HasContext(c10::DeviceIndex device) { return c10::cuda::hasPrimaryContext(device); }

std::unique_ptr<Driver> MakeDriver(int device) {
  return std::make_unique<CudaDriver>(device, &exports);
}

void SetExportable(bool exportable) { exports = exportable; }

bool Exports() { return exports; }

void RequireDriverSupport(int device, bool exportable) {
  std::string reason = "its driver cannot export memory as file descriptors; leave exportable out";
  try {
    if (CudaDriver(device).CanExport() || !exportable) return;
  } catch (const DriverError& error) {
    reason = error.what();
  }
  throw std::runtime_error("cudagraph_pool cannot be enabled for GPU " + std::to_string(device) +
                           ": " + reason);
}

void EndHostRoute(c10::MempoolId_t id) {
  try {
    at::getHostAllocator(at::kCUDA)->end_allocate_to_pool(id);
  } catch (const c10::Error&) {  // NOLINT(bugprone-empty-catch): torch closed it
  }
}

TorchWorkspaces FindWorkspaces(bool of_cublaslt) {
  // torch has loaded it. It is found by name, since wheels are built without so large a library.
  void* const library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  const auto find = [&](const char* of_cublas, const char* lt) {
    return library == nullptr ? nullptr : dlsym(library, of_cublaslt ? lt : of_cublas);
  };
  auto* const map = reinterpret_cast<WorkspaceMap& (*)()>(
      find("_ZN2at4cuda33cublas_handle_stream_to_workspaceEv",
           "_ZN2at4cuda35cublaslt_handle_stream_to_workspaceEv"));
  auto* const size = reinterpret_cast<size_t (*)()>(
      find("_ZN2at4cuda22getChosenWorkspaceSizeEv", "_ZN2at4cuda26getCUDABlasLtWorkspaceSizeEv"));
  if (map == nullptr || size == nullptr) return {};
  return {.workspaces = &map(), .bytes = size};
}

}  // namespace cgp
