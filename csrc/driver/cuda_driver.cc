#include "driver/cuda_driver.h"

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <memory>

#include "core/base/error.h"
#include "driver/cuda_api.h"
#include "driver/cuda_context.h"

namespace cgp {
namespace {

DriverStatus OutOfMemoryMeans(DriverCall call) {
  switch (call) {
    case DriverCall::kReserve:
      return DriverStatus::kOutOfAddresses;
    case DriverCall::kCreate:
    case DriverCall::kMap:
    case DriverCall::kSetAccess:
      return DriverStatus::kOutOfMemory;
    default:
      return DriverStatus::kFailed;
  }
}

CUmemLocation LocationOf(CUdevice device) {
  CUmemLocation location{};
  location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  location.id = device;
  return location;
}

// As PyTorch's expandable segments make theirs.
CUmemAllocationProp HandleProperties(CUdevice device, bool rdma_capable, bool exportable) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes =
      exportable ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_NONE;
  properties.location = LocationOf(device);
  properties.allocFlags.gpuDirectRDMACapable = rdma_capable ? 1 : 0;
  return properties;
}

CUstream StreamOf(StreamId stream) { return reinterpret_cast<CUstream>(WithoutDevice(stream)); }
CUgraphNode ToCuda(GraphNode node) { return reinterpret_cast<CUgraphNode>(node); }
GraphNode ToGraphNode(CUgraphNode node) { return GraphNode{reinterpret_cast<uintptr_t>(node)}; }

// A kernel behind a programmatic edge may begin, and end, before the one in front of it is complete.
bool WaitsForCompletion(const CUgraphEdgeData& edge) {
  return edge.type == CU_GRAPH_DEPENDENCY_TYPE_DEFAULT && edge.from_port == 0;
}

CUevent CudaEvent(Event event) { return reinterpret_cast<CUevent>(event); }

}  // namespace

// Adds the time from its begin to its end.
class CudaDriver::Timer {
 public:
  explicit Timer(AtomicKind& kind) : kind_(kind) {}
  ~Timer() {
    const std::chrono::nanoseconds elapsed = std::chrono::steady_clock::now() - begin_;
    kind_.calls.fetch_add(1, std::memory_order_relaxed);
    kind_.nanoseconds.fetch_add(static_cast<uint64_t>(elapsed.count()), std::memory_order_relaxed);
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

 private:
  AtomicKind& kind_;
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

CudaDriver::CudaDriver(int device, const std::atomic<bool>* exportable)
    : CudaDriver(device, CudaApiOrThrow(device), exportable) {}

CudaDriver::CudaDriver(int device, const CudaApi& api, const std::atomic<bool>* exportable)
    : device_(device), api_(api), exportable_(exportable) {
  context_ = std::make_unique<CudaContext>(api_, device);
  cu_device_ = context_->cu_device();
  if (Attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) == 0) {
    throw DriverError(DriverStatus::kFailed, "cuDeviceGetAttribute", CUDA_ERROR_NOT_SUPPORTED,
                      "CUDA_ERROR_NOT_SUPPORTED", 0, device,
                      "it does not support CUDA's virtual memory management (cuMemCreate, "
                      "cuMemMap)");
  }
  rdma_capable_ = Attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED) != 0;
  const CUmemAllocationProp properties =
      HandleProperties(cu_device_, rdma_capable_, IsExportable());
  size_t granularity = 0;
  context_->Check("cuMemGetAllocationGranularity",
                  api_.cuMemGetAllocationGranularity(&granularity, &properties,
                                                     CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
  CGP_CHECK(std::has_single_bit(granularity));
  granularity_ = granularity;
  LetActiveDevicesIn();
}

CudaDriver::~CudaDriver() = default;

bool CudaDriver::CanExport() const {
  return Attribute(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) != 0;
}

CudaDriverStats CudaDriver::stats() const {
  CudaDriverStats stats;
  for (size_t i = 0; i < kDriverCallKinds; ++i) {
    stats.kinds[i] = {.calls = stats_[i].calls, .nanoseconds = stats_[i].nanoseconds};
  }
  return stats;
}

CudaContext& CudaDriver::ContextOf(StreamId stream) {
  const int device = DeviceOf(stream).value_or(device_);
  if (device == device_) return *context_;
  const std::lock_guard lock(others_mutex_);
  const auto known = others_.find(device);
  if (known != others_.end()) return *known->second;
  return *others_.emplace(device, std::make_unique<CudaContext>(api_, device)).first->second;
}

int CudaDriver::Attribute(int attribute) const {
  int value = 0;
  context_->Check(
      "cuDeviceGetAttribute",
      api_.cuDeviceGetAttribute(&value, static_cast<CUdevice_attribute>(attribute), cu_device_));
  return value;
}

bool CudaDriver::CanReach(int cu_peer) const {
  int can_access = 0;
  context_->Check("cuDeviceCanAccessPeer",
                  api_.cuDeviceCanAccessPeer(&can_access, cu_peer, cu_device_));
  return can_access != 0;
}

void CudaDriver::LetActiveDevicesIn() {
  int count = 0;
  context_->Check("cuDeviceGetCount", api_.cuDeviceGetCount(&count));
  for (int peer = 0; peer < count; ++peer) {
    if (peer == device_) continue;
    CUdevice cu_peer = 0;
    context_->Check("cuDeviceGet", api_.cuDeviceGet(&cu_peer, peer));
    unsigned int flags = 0;
    int active = 0;
    context_->Check("cuDevicePrimaryCtxGetState",
                    api_.cuDevicePrimaryCtxGetState(cu_peer, &flags, &active));
    if (active != 0 && CanReach(cu_peer)) peers_.push_back(cu_peer);
  }
}

template <typename Function>
void CudaDriver::Call(CudaContext& context, DriverCall call, std::string_view name, uint64_t bytes,
                      Function function) {
  const CurrentContext current(context);
  const Timer timer(stats_[static_cast<size_t>(call)]);
  context_->Check(name, function(), OutOfMemoryMeans(call), bytes);
}

Address CudaDriver::Reserve(uint64_t bytes) {
  CUdeviceptr address = 0;
  Call(*context_, DriverCall::kReserve, "cuMemAddressReserve", bytes,
       [&] { return api_.cuMemAddressReserve(&address, bytes, granularity_, 0, 0); });
  return address;
}

void CudaDriver::FreeAddresses(Address address, uint64_t bytes) {
  Call(*context_, DriverCall::kFreeAddresses, "cuMemAddressFree", bytes,
       [&] { return api_.cuMemAddressFree(address, bytes); });
}

Handle CudaDriver::Create(uint64_t bytes) {
  const CUmemAllocationProp properties =
      HandleProperties(cu_device_, rdma_capable_, IsExportable());
  CUmemGenericAllocationHandle handle = 0;
  Call(*context_, DriverCall::kCreate, "cuMemCreate", bytes,
       [&] { return api_.cuMemCreate(&handle, bytes, &properties, 0); });
  return Handle{handle};
}

void CudaDriver::Release(Handle handle) {
  Call(*context_, DriverCall::kRelease, "cuMemRelease", 0,
       [&] { return api_.cuMemRelease(static_cast<CUmemGenericAllocationHandle>(handle)); });
}

void CudaDriver::Map(Address address, uint64_t bytes, Handle handle) {
  Call(*context_, DriverCall::kMap, "cuMemMap", bytes, [&] {
    return api_.cuMemMap(address, bytes, 0, static_cast<CUmemGenericAllocationHandle>(handle), 0);
  });
}

void CudaDriver::SetAccess(Address address, uint64_t bytes) {
  const auto grant = [](CUdevice device) {
    return CUmemAccessDesc{LocationOf(device), CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  };
  std::vector<CUmemAccessDesc> access = {grant(cu_device_)};
  {
    const std::lock_guard lock(peers_mutex_);
    for (const CUdevice peer : peers_) access.push_back(grant(peer));
  }
  Call(*context_, DriverCall::kSetAccess, "cuMemSetAccess", bytes,
       [&] { return api_.cuMemSetAccess(address, bytes, access.data(), access.size()); });
}

void CudaDriver::Unmap(Address address, uint64_t bytes) {
  Call(*context_, DriverCall::kUnmap, "cuMemUnmap", bytes,
       [&] { return api_.cuMemUnmap(address, bytes); });
}

void CudaDriver::AddPeer(int peer) {
  if (peer == device_) return;
  CUdevice cu_peer = 0;
  Call(*context_, DriverCall::kAddPeer, "cuDeviceGet", 0,
       [&] { return api_.cuDeviceGet(&cu_peer, peer); });
  // Refused here, or every SetAccess() from now on would be.
  if (!CanReach(cu_peer)) {
    throw DriverError(DriverStatus::kFailed, "cuDeviceCanAccessPeer",
                      CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", 0,
                      device_, "device " + std::to_string(peer) + " cannot access its memory");
  }
  const std::lock_guard lock(peers_mutex_);
  if (std::find(peers_.begin(), peers_.end(), cu_peer) == peers_.end()) peers_.push_back(cu_peer);
}

void CudaDriver::Quiesce() {
  const UnsafeCallsAllowed allowed(api_);  // some other thread may capture without our knowing
  for (CudaContext* const context : Contexts()) {
    Call(*context, DriverCall::kQuiesce, "cuCtxSynchronize", 0,
         [&] { return api_.cuCtxSynchronize(); });
  }
}

void CudaDriver::Capture(StreamId stream, Frontier* frontier) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  cuuint64_t id = 0;
  const CUgraphNode* nodes = nullptr;
  const CUgraphEdgeData* edges = nullptr;
  size_t count = 0;
  // Not timed: this is asked at each free, and answered in less time than it takes to look at the
  // clock.
  const CurrentContext current(ContextOf(stream));
  const CUresult code =
      api_.cuStreamGetCaptureInfo(StreamOf(stream), &status, &id, nullptr, &nodes, &edges, &count);
  frontier->capture = kNoCapture;
  frontier->nodes.clear();
  frontier->waits = true;
  frontier->held = false;
  // The legacy default stream never captures, but while a blocking stream does, whatever is done
  // with it breaks that capture: an event too.
  if (code == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) {
    frontier->held = true;
    return;
  }
  context_->Check("cuStreamGetCaptureInfo", code);
  frontier->held = status != CU_STREAM_CAPTURE_STATUS_NONE;
  if (status != CU_STREAM_CAPTURE_STATUS_ACTIVE) return;
  frontier->capture = id;
  for (size_t i = 0; i < count; ++i) frontier->nodes.push_back(ToGraphNode(nodes[i]));
  // No edge data stands for edges without any.
  frontier->waits = edges == nullptr || std::all_of(edges, edges + count, WaitsForCompletion);
}

bool CudaDriver::Dependencies(GraphNode node, std::vector<GraphNode>* nodes) {
  const CurrentContext current(*context_);
  // Whether the room is enough for all; where it is full there may be more.
  bool waits = true;
  const auto read_into = [&](auto found, auto edges) {
    size_t count = found.size();
    context_->Check(
        "cuGraphNodeGetDependencies",
        api_.cuGraphNodeGetDependencies(ToCuda(node), found.data(), edges.data(), &count));
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

// An event is recorded on streams of its own context only.
template <typename Record>
Event CudaDriver::NewEvent(CudaContext& context, DriverCall call, Record record) {
  CUevent event = nullptr;
  Call(context, call, "cuEventCreate", 0,
       [&] { return api_.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING); });
  const Event created{reinterpret_cast<uintptr_t>(event)};
  try {
    record(event);
  } catch (...) {  // also where memory does not suffice for the error
    DestroyEvent(created);
    throw;
  }
  return created;
}

Event CudaDriver::RecordEvent(StreamId stream) {
  CudaContext& context = ContextOf(stream);
  return NewEvent(context, DriverCall::kRecordEvent, [&](CUevent event) {
    Call(context, DriverCall::kRecordEvent, "cuEventRecord", 0,
         [&] { return api_.cuEventRecord(event, StreamOf(stream)); });
  });
}

Event CudaDriver::RecordDeviceEvent() {
  if (api_.cuCtxRecordEvent == nullptr) Quiesce();  // an event that is never recorded is done
  const std::vector<CudaContext*> contexts = Contexts();
  std::map<Event, std::vector<Event>> mark;
  std::vector<Event> events;
  events.reserve(contexts.size());
  try {
    for (CudaContext* const context : contexts) events.push_back(MarkAll(*context));
    if (events.size() > 1)
      mark.emplace(events.front(), std::vector(events.begin() + 1, events.end()));
  } catch (...) {
    for (const Event event : events) DestroyEvent(event);
    throw;
  }
  const std::lock_guard lock(others_mutex_);
  others_marked_.merge(mark);
  return events.front();
}

// All the work of one device.
Event CudaDriver::MarkAll(CudaContext& context) {
  return NewEvent(context, DriverCall::kRecordDeviceEvent, [&](CUevent event) {
    if (api_.cuCtxRecordEvent == nullptr) return;
    Call(context, DriverCall::kRecordDeviceEvent, "cuCtxRecordEvent", 0,
         [&] { return api_.cuCtxRecordEvent(context.Get(), event); });
  });
}

// The device's, and of those that streams were asked of.
std::vector<CudaContext*> CudaDriver::Contexts() {
  std::vector<CudaContext*> contexts = {context_.get()};
  const std::lock_guard lock(others_mutex_);
  for (const auto& [device, context] : others_) contexts.push_back(context.get());
  return contexts;
}

// The event, and those that mark other devices with it.
std::vector<Event> CudaDriver::MarkedWith(Event event) {
  std::vector<Event> events = {event};
  const std::lock_guard lock(others_mutex_);
  if (const auto others = others_marked_.find(event); others != others_marked_.end()) {
    events.insert(events.end(), others->second.begin(), others->second.end());
  }
  return events;
}

bool CudaDriver::EventDone(Event event) {
  // A query is "potentially unsafe" while another thread captures: it would fail and invalidate
  // that capture.
  const UnsafeCallsAllowed allowed(api_);
  for (const Event one : MarkedWith(event)) {
    bool done = true;
    Call(*context_, DriverCall::kEventDone, "cuEventQuery", 0, [&] {
      const CUresult code = api_.cuEventQuery(CudaEvent(one));
      done = code != CUDA_ERROR_NOT_READY;
      return done ? code : CUDA_SUCCESS;
    });
    if (!done) return false;
  }
  return true;
}

void CudaDriver::WaitEvent(StreamId stream, Event event) {
  for (const Event one : MarkedWith(event)) {
    Call(ContextOf(stream), DriverCall::kWaitEvent, "cuStreamWaitEvent", 0, [&] {
      return api_.cuStreamWaitEvent(StreamOf(stream), CudaEvent(one), CU_EVENT_WAIT_DEFAULT);
    });
  }
}

void CudaDriver::DestroyEvent(Event event) noexcept {
  decltype(others_marked_)::node_type others;
  {
    const std::lock_guard lock(others_mutex_);
    others = others_marked_.extract(event);
  }
  // An event knows its context. There is nothing to do about an error, which can only be that of
  // earlier work.
  const Timer timer(stats_[static_cast<size_t>(DriverCall::kDestroyEvent)]);
  api_.cuEventDestroy(CudaEvent(event));
  if (others.empty()) return;
  for (const Event other : others.mapped()) api_.cuEventDestroy(CudaEvent(other));
}

MemoryInfo CudaDriver::Info() {
  size_t free = 0;
  size_t total = 0;
  Call(*context_, DriverCall::kInfo, "cuMemGetInfo", 0,
       [&] { return api_.cuMemGetInfo(&free, &total); });
  return {.free_bytes = free, .total_bytes = total};
}

}  // namespace cgp
