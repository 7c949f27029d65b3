#include "driver/faulty_driver.h"

#include <string>

namespace cgp {
namespace {

// The code that CUDA gives for each status, and its symbol.
int Code(DriverStatus status) { return status == DriverStatus::kFailed ? 999 : 2; }

std::string_view Symbol(DriverStatus status) {
  return status == DriverStatus::kFailed ? "CUDA_ERROR_UNKNOWN" : "CUDA_ERROR_OUT_OF_MEMORY";
}

}  // namespace

void FaultyDriver::Arm(const Fault& fault) {
  const std::lock_guard lock(mutex_);
  fault_ = fault;
  calls_.clear();
  counted_ = 0;
  failures_ = 0;
}

void FaultyDriver::Disarm() {
  const std::lock_guard lock(mutex_);
  fault_.reset();
  calls_.clear();
  counted_ = 0;
  failures_ = 0;
}

std::vector<DriverCall> FaultyDriver::calls() const {
  const std::lock_guard lock(mutex_);
  return calls_;
}

uint64_t FaultyDriver::call_count() const {
  const std::lock_guard lock(mutex_);
  return calls_.size();
}

uint64_t FaultyDriver::failures() const {
  const std::lock_guard lock(mutex_);
  return failures_;
}

void FaultyDriver::Count(DriverCall call, uint64_t bytes) {
  meanwhile_(call);
  const std::lock_guard lock(mutex_);
  calls_.push_back(call);
  if (!fault_ || (fault_->only && *fault_->only != call)) return;
  ++counted_;
  const bool fails =
      fault_->for_good ? counted_ >= fault_->call_number : counted_ == fault_->call_number;
  if (!fails) return;
  ++failures_;
  throw DriverError(fault_->status, Name(call), Code(fault_->status), Symbol(fault_->status), bytes,
                    inner_.device(), "made to fail as call " + std::to_string(counted_));
}

Address FaultyDriver::Reserve(uint64_t bytes) {
  Count(DriverCall::kReserve, bytes);
  return inner_.Reserve(bytes);
}

void FaultyDriver::FreeAddresses(Address address, uint64_t bytes) {
  Count(DriverCall::kFreeAddresses, bytes);
  inner_.FreeAddresses(address, bytes);
}

Handle FaultyDriver::Create(uint64_t bytes) {
  Count(DriverCall::kCreate, bytes);
  return inner_.Create(bytes);
}

void FaultyDriver::Release(Handle handle) {
  Count(DriverCall::kRelease);
  inner_.Release(handle);
}

void FaultyDriver::Map(Address address, uint64_t bytes, Handle handle) {
  Count(DriverCall::kMap, bytes);
  inner_.Map(address, bytes, handle);
}

void FaultyDriver::SetAccess(Address address, uint64_t bytes) {
  Count(DriverCall::kSetAccess, bytes);
  inner_.SetAccess(address, bytes);
}

void FaultyDriver::Unmap(Address address, uint64_t bytes) {
  Count(DriverCall::kUnmap, bytes);
  inner_.Unmap(address, bytes);
}

void FaultyDriver::AddPeer(int peer) {
  Count(DriverCall::kAddPeer);
  inner_.AddPeer(peer);
}

void FaultyDriver::Quiesce() {
  Count(DriverCall::kQuiesce);
  inner_.Quiesce();
}

void FaultyDriver::Capture(StreamId stream, Frontier* frontier) {
  Count(DriverCall::kCapture);
  inner_.Capture(stream, frontier);
}

bool FaultyDriver::Dependencies(GraphNode node, std::vector<GraphNode>* nodes) {
  Count(DriverCall::kDependencies);
  return inner_.Dependencies(node, nodes);
}

Event FaultyDriver::RecordEvent(StreamId stream) {
  Count(DriverCall::kRecordEvent);
  return inner_.RecordEvent(stream);
}

Event FaultyDriver::RecordDeviceEvent() {
  Count(DriverCall::kRecordDeviceEvent);
  return inner_.RecordDeviceEvent();
}

bool FaultyDriver::EventDone(Event event) {
  Count(DriverCall::kEventDone);
  return inner_.EventDone(event);
}

void FaultyDriver::WaitEvent(StreamId stream, Event event) {
  Count(DriverCall::kWaitEvent);
  inner_.WaitEvent(stream, event);
}

void FaultyDriver::DestroyEvent(Event event) noexcept { inner_.DestroyEvent(event); }

MemoryInfo FaultyDriver::Info() {
  Count(DriverCall::kInfo);
  return inner_.Info();
}

}  // namespace cgp
