#include "driver/cuda_driver.h"

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <memory>

#include "core/base/error.h"

namespace cgp {
namespace {

CUmemLocation LocationOf(CUdevice device) {
  CUmemLocation location{};
  location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  location.id = device;
  return location;
}

CUstream StreamOf(StreamId stream) { return reinterpret_cast<CUstream>(WithoutDevice(stream)); }
CUgraphNode ToCuda(GraphNode node) { return reinterpret_cast<CUgraphNode>(node); }
GraphNode ToGraphNode(CUgraphNode node) { return GraphNode{reinterpret_cast<uintptr_t>(node)}; }

// A kernel behind a programmatic edge may begin, and end, before the one in front of it is
// complete.
bool WaitsForCompletion(const CUgraphEdgeData& edge) {
  return edge.type == CU_GRAPH_DEPENDENCY_TYPE_DEFAULT && edge.from_port == 0;
}

struct EventDestroyer {
  const CudaApi* api;
  // An event knows its context. An error can only be one of earlier work, so nothing is done about
  // it.
  void operator()(CUevent event) const { api->cuEventDestroy(event); }
};

// An Event is the address of a Mark: CUDA events, one for each device whose work it marks.
using Mark = std::vector<std::unique_ptr<CUevent_st, EventDestroyer>>;

Mark& MarkOf(Event event) { return *reinterpret_cast<Mark*>(event); }

}  // namespace

CudaDriver::CudaDriver(int device, const CudaApi& api, const std::atomic<bool>* exportable)
    : api_(api), exportable_(exportable), context_(api, device) {
  if (Attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) == 0) {
    throw DriverError(DriverStatus::kFailed, "cuDeviceGetAttribute", CUDA_ERROR_NOT_SUPPORTED,
                      "CUDA_ERROR_NOT_SUPPORTED", 0, device,
                      "it does not support CUDA's virtual memory management (cuMemCreate, "
                      "cuMemMap)");
  }
  rdma_capable_ = Attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED) != 0;
  const CUmemAllocationProp properties = HandleProperties();
  size_t granularity = 0;
  context_.Call(api_.cuMemGetAllocationGranularity, &granularity, &properties,
                CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
  CGP_CHECK(std::has_single_bit(granularity));
  granularity_ = granularity;
  LetActiveDevicesIn();
}

bool CudaDriver::CanExport() const {
  return Attribute(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) != 0;
}

CudaContext& CudaDriver::ContextOf(StreamId stream) {
  const int its_device = DeviceOf(stream).value_or(device());
  if (its_device == device()) return context_;
  const std::lock_guard lock(others_mutex_);
  return others_.try_emplace(its_device, api_, its_device).first->second;
}

int CudaDriver::Attribute(CUdevice_attribute attribute) const {
  int value = 0;
  context_.Call(api_.cuDeviceGetAttribute, &value, attribute, context_.cu_device());
  return value;
}

bool CudaDriver::CanReach(CUdevice peer) const {
  int can_access = 0;
  context_.Call(api_.cuDeviceCanAccessPeer, &can_access, peer, context_.cu_device());
  return can_access != 0;
}

void CudaDriver::LetActiveDevicesIn() {
  int count = 0;
  context_.Call(api_.cuDeviceGetCount, &count);
  for (int peer = 0; peer < count; ++peer) {
    if (peer == device()) continue;
    CUdevice cu_peer = 0;
    context_.Call(api_.cuDeviceGet, &cu_peer, peer);
    unsigned int flags = 0;
    int active = 0;
    context_.Call(api_.cuDevicePrimaryCtxGetState, cu_peer, &flags, &active);
    if (active != 0 && CanReach(cu_peer)) peers_.push_back(cu_peer);
  }
}

// As PyTorch's expandable segments make theirs.
CUmemAllocationProp CudaDriver::HandleProperties() const {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = exportable_ != nullptr && *exportable_
                                        ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
                                        : CU_MEM_HANDLE_TYPE_NONE;
  properties.location = LocationOf(context_.cu_device());
  properties.allocFlags.gpuDirectRDMACapable = rdma_capable_ ? 1 : 0;
  return properties;
}

template <typename Function>
CUresult CudaDriver::Timed(std::string_view name, const Function& call) {
  const auto begin = std::chrono::steady_clock::now();
  const CUresult code = call();
  const std::chrono::nanoseconds elapsed = std::chrono::steady_clock::now() - begin;
  const std::lock_guard lock(calls_mutex_);
  const auto call_time = std::ranges::find_if(
      calls_, [&](const auto& each) { return each.first.empty() || each.first == name; });
  if (call_time == calls_.end()) return code;
  call_time->first = name;
  ++call_time->second.first;
  call_time->second.second += static_cast<uint64_t>(elapsed.count());
  return code;
}

CudaDriver::CallTimes CudaDriver::calls() const {
  const std::lock_guard lock(calls_mutex_);
  CallTimes calls(calls_.begin(), calls_.end());
  calls.erase("");
  return calls;
}

template <typename... Parameters>
void CudaDriver::Call(CudaContext& context, Error error,
                      const CudaFunction<CUresult(Parameters...)>& function,
                      std::type_identity_t<Parameters>... arguments) {
  const CurrentContext current(context);
  const CUresult code = Timed(function.name, [&] { return function(arguments...); });
  context_.Check(function.name, code, error.out_of_memory, error.bytes);
}

Address CudaDriver::Reserve(uint64_t bytes) {
  CUdeviceptr address = 0;
  Call(context_, {bytes, DriverStatus::kOutOfAddresses}, api_.cuMemAddressReserve, &address, bytes,
       granularity_, 0, 0);
  return address;
}

void CudaDriver::FreeAddresses(Address address, uint64_t bytes) {
  Call(context_, {bytes}, api_.cuMemAddressFree, address, bytes);
}

Handle CudaDriver::Create(uint64_t bytes) {
  const CUmemAllocationProp properties = HandleProperties();
  CUmemGenericAllocationHandle handle = 0;
  Call(context_, {bytes, DriverStatus::kOutOfMemory}, api_.cuMemCreate, &handle, bytes, &properties,
       0);
  return Handle{handle};
}

void CudaDriver::Release(Handle handle) {
  Call(context_, {}, api_.cuMemRelease, static_cast<CUmemGenericAllocationHandle>(handle));
}

void CudaDriver::Map(Address address, uint64_t bytes, Handle handle) {
  Call(context_, {bytes, DriverStatus::kOutOfMemory}, api_.cuMemMap, address, bytes, 0,
       static_cast<CUmemGenericAllocationHandle>(handle), 0);
}

void CudaDriver::SetAccess(Address address, uint64_t bytes) {
  const auto grant = [](CUdevice device) {
    return CUmemAccessDesc{LocationOf(device), CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  };
  std::vector<CUmemAccessDesc> access = {grant(context_.cu_device())};
  {
    const std::lock_guard lock(peers_mutex_);
    for (const CUdevice peer : peers_) access.push_back(grant(peer));
  }
  Call(context_, {bytes, DriverStatus::kOutOfMemory}, api_.cuMemSetAccess, address, bytes,
       access.data(), access.size());
}

void CudaDriver::Unmap(Address address, uint64_t bytes) {
  Call(context_, {bytes}, api_.cuMemUnmap, address, bytes);
}

void CudaDriver::AddPeer(int peer) {
  if (peer == device()) return;
  CUdevice cu_peer = 0;
  Call(context_, {}, api_.cuDeviceGet, &cu_peer, peer);
  // It is refused here: else every later SetAccess() would be.
  if (!CanReach(cu_peer)) {
    throw DriverError(DriverStatus::kFailed, "cuDeviceCanAccessPeer",
                      CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", 0,
                      device(), "device " + std::to_string(peer) + " cannot access its memory");
  }
  const std::lock_guard lock(peers_mutex_);
  if (std::find(peers_.begin(), peers_.end(), cu_peer) == peers_.end()) peers_.push_back(cu_peer);
}

void CudaDriver::Quiesce() {
  const UnsafeCallsAllowed allowed(api_);  // another thread may capture without our knowing
  for (CudaContext* const context : Contexts()) {
    Call(*context, {}, api_.cuCtxSynchronize);
  }
}

void CudaDriver::Capture(StreamId stream, Frontier* frontier) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  cuuint64_t id = 0;
  const CUgraphNode* nodes = nullptr;
  const CUgraphEdgeData* edges = nullptr;
  size_t count = 0;
  // Not timed: each free asks this, and the answer takes less time than reading the clock.
  const CurrentContext current(ContextOf(stream));
  const CUresult code =
      api_.cuStreamGetCaptureInfo(StreamOf(stream), &status, &id, nullptr, &nodes, &edges, &count);
  frontier->capture = kNoCapture;
  frontier->nodes.clear();
  frontier->waits = true;
  frontier->held = false;
  // The legacy default stream never captures. But while a blocking stream does, whatever is done
  // with it, even an event, breaks that capture.
  if (code == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) {
    frontier->held = true;
    return;
  }
  context_.Check(api_.cuStreamGetCaptureInfo.name, code);
  frontier->held = status != CU_STREAM_CAPTURE_STATUS_NONE;
  if (status != CU_STREAM_CAPTURE_STATUS_ACTIVE) return;
  frontier->capture = id;
  for (size_t i = 0; i < count; ++i) frontier->nodes.push_back(ToGraphNode(nodes[i]));
  // If no edge has data, CUDA returns none.
  frontier->waits = edges == nullptr || std::all_of(edges, edges + count, WaitsForCompletion);
}

bool CudaDriver::Dependencies(GraphNode node, std::vector<GraphNode>* nodes) {
  const CurrentContext current(context_);
  // Returns whether the room is enough for all; if it is full there may be more.
  bool waits = true;
  const auto read_into = [&](auto found, auto edges) {
    size_t count = found.size();
    context_.Call(api_.cuGraphNodeGetDependencies, ToCuda(node), found.data(), edges.data(),
                  &count);
    if (count >= found.size()) return false;
    nodes->clear();
    for (size_t i = 0; i < count; ++i) nodes->push_back(ToGraphNode(found[i]));
    waits = std::all_of(edges.data(), edges.data() + count, WaitsForCompletion);
    return true;
  };
  // Enough for nearly all.
  if (read_into(std::array<CUgraphNode, 8>{}, std::array<CUgraphEdgeData, 8>{})) return waits;
  size_t room = 16;
  while (!read_into(std::vector<CUgraphNode>(room), std::vector<CUgraphEdgeData>(room))) room *= 2;
  return waits;
}

// An event can be recorded only on streams of its own context.
template <typename Record>
Event CudaDriver::NewEvent(const std::vector<CudaContext*>& contexts, Record record) {
  auto mark = std::make_unique<Mark>();
  for (CudaContext* const context : contexts) {
    CUevent event = nullptr;
    Call(*context, {}, api_.cuEventCreate, &event, CU_EVENT_DISABLE_TIMING);
    Mark::value_type created(event, {&api_});
    record(*context, event);
    mark->push_back(std::move(created));
  }
  return Event{reinterpret_cast<uintptr_t>(mark.release())};
}

Event CudaDriver::RecordEvent(StreamId stream) {
  return NewEvent({&ContextOf(stream)}, [&](CudaContext& context, CUevent event) {
    Call(context, {}, api_.cuEventRecord, event, StreamOf(stream));
  });
}

Event CudaDriver::RecordDeviceEvent() {
  const bool records = api_.cuCtxRecordEvent != nullptr;
  if (!records) Quiesce();  // an event that is never recorded is done
  return NewEvent(Contexts(), [&](CudaContext& context, CUevent event) {
    if (records) Call(context, {}, api_.cuCtxRecordEvent, context.Get(), event);
  });
}

// The contexts of the device, and of devices whose streams were given.
std::vector<CudaContext*> CudaDriver::Contexts() {
  std::vector<CudaContext*> contexts = {&context_};
  const std::lock_guard lock(others_mutex_);
  for (auto& [device, context] : others_) contexts.push_back(&context);
  return contexts;
}

bool CudaDriver::EventDone(Event event) {
  // While another thread captures, a query is "potentially unsafe": it would fail and invalidate
  // that capture.
  const UnsafeCallsAllowed allowed(api_);
  const CurrentContext current(context_);
  for (const auto& one : MarkOf(event)) {
    const CUresult code =
        Timed(api_.cuEventQuery.name, [&] { return api_.cuEventQuery(one.get()); });
    if (code == CUDA_ERROR_NOT_READY) return false;
    context_.Check(api_.cuEventQuery.name, code);
  }
  return true;
}

void CudaDriver::WaitEvent(StreamId stream, Event event) {
  for (const auto& one : MarkOf(event)) {
    Call(ContextOf(stream), {}, api_.cuStreamWaitEvent, StreamOf(stream), one.get(),
         CU_EVENT_WAIT_DEFAULT);
  }
}

void CudaDriver::DestroyEvent(Event event) noexcept { delete &MarkOf(event); }

MemoryInfo CudaDriver::Info() {
  size_t free = 0;
  size_t total = 0;
  Call(context_, {}, api_.cuMemGetInfo, &free, &total);
  return {.free_bytes = free, .total_bytes = total};
}

}  // namespace cgp
