#include "torch/observe/metered_driver.h"

#include <string>

#include "torch/errors.h"
#include "torch/observe/history.h"

namespace cgp {
namespace {

struct PurposeOfThread {
  PoolId pool;
  StreamId stream{};
};
thread_local PurposeOfThread purpose;
thread_local bool refused_by_limit = false;

void Note(History::Action action, int device, Address address, uint64_t bytes) {
  History& history = History::Get();
  if (!history.active()) return;
  // What is mapped is mapped, also where memory does not suffice for noting it: the core would take
  // that for the driver's refusal, and in a destructor it would end the process.
  WithWarnings("the history of allocations", [&] {
    history.Mapped({action, static_cast<c10::DeviceIndex>(device), address, bytes, purpose.stream,
                    purpose.pool});
  });
}

}  // namespace

MeteredDriver::Purpose::Purpose(PoolId pool, StreamId stream) {
  purpose = {pool, stream};
  refused_by_limit = false;
}

MeteredDriver::Purpose::~Purpose() { purpose = {}; }

bool MeteredDriver::Purpose::limit_refused() { return refused_by_limit; }

Handle MeteredDriver::Create(uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  const uint64_t limit = limit_.load(std::memory_order_relaxed);
  const uint64_t held = created_.load(std::memory_order_relaxed);
  refused_by_limit = held > limit || bytes > limit - held;
  if (refused_by_limit) {
    throw DriverError(DriverStatus::kOutOfMemory, "Create", 2, "memory fraction", bytes, device(),
                      "torch.cuda.set_per_process_memory_fraction() leaves graph pools " +
                          std::to_string(limit >> 20) + " MiB, of which " +
                          std::to_string(held >> 20) + " MiB are in use");
  }
  const Handle handle = inner().Create(bytes);
  Undo created([&] { inner().Release(handle); });
  sizes_.emplace(handle, bytes);
  created.Keep();
  created_.fetch_add(bytes, std::memory_order_release);
  changes_.fetch_add(1, std::memory_order_release);
  return handle;
}

void MeteredDriver::Release(Handle handle) {
  const std::lock_guard lock(mutex_);  // first: a released handle's value may come back
  inner().Release(handle);
  const auto size = sizes_.find(handle);
  created_.fetch_sub(size->second, std::memory_order_release);
  changes_.fetch_add(1, std::memory_order_release);
  sizes_.erase(size);
}

void MeteredDriver::Map(Address address, uint64_t bytes, Handle handle) {
  inner().Map(address, bytes, handle);
  Note(History::Action::SEGMENT_MAP, device(), address, bytes);
}

void MeteredDriver::Unmap(Address address, uint64_t bytes) {
  inner().Unmap(address, bytes);
  Note(History::Action::SEGMENT_UNMAP, device(), address, bytes);
}

}  // namespace cgp
