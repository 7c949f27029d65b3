#include "torch/metered_driver.h"

#include <c10/util/Exception.h>

#include <exception>
#include <string>

#include "torch/history.h"

namespace cgp {
namespace {

struct PurposeOfThread {
  PoolId pool;
  StreamId stream{};
};
thread_local PurposeOfThread purpose;

void Note(History::Action action, int device, Address address, uint64_t bytes) {
  History& history = History::Get();
  if (!history.active()) return;
  // No stack: whoever maps holds a lock, and gathering one may wait for the GIL.
  const auto warn = [](const std::string& error) {
    TORCH_WARN("cudagraph_pool: a tracker of allocations failed: " + error);
  };
  // What is mapped is mapped, whatever a tracker says of it: the core would take its error for the
  // driver's refusal, and in a destructor it would end the process.
  try {
    history.Record({action, static_cast<c10::DeviceIndex>(device), address, bytes, purpose.stream,
                    purpose.pool},
                   nullptr, "");
  } catch (const c10::Error& error) {
    warn(error.what_without_backtrace());
  } catch (const std::exception& error) {
    warn(error.what());
  }
}

}  // namespace

MeteredDriver::Purpose::Purpose(PoolId pool, StreamId stream) { purpose = {pool, stream}; }

MeteredDriver::Purpose::~Purpose() { purpose = {}; }

Handle MeteredDriver::Create(uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  const uint64_t limit = limit_.load(std::memory_order_relaxed);
  if (created_ > limit || bytes > limit - created_) {
    throw DriverError(DriverStatus::kOutOfMemory, "Create", 2, "memory fraction", bytes, device(),
                      "torch.cuda.set_per_process_memory_fraction() leaves graph pools " +
                          std::to_string(limit >> 20) + " MiB, of which " +
                          std::to_string(created_ >> 20) + " MiB are in use");
  }
  const Handle handle = inner_->Create(bytes);
  sizes_.emplace(handle, bytes);
  created_ += bytes;
  return handle;
}

void MeteredDriver::Release(Handle handle) {
  const std::lock_guard lock(mutex_);  // first: a released handle's value may come back
  inner_->Release(handle);
  const auto size = sizes_.find(handle);
  created_ -= size->second;
  sizes_.erase(size);
}

void MeteredDriver::Map(Address address, uint64_t bytes, Handle handle) {
  inner_->Map(address, bytes, handle);
  Note(History::Action::SEGMENT_MAP, device(), address, bytes);
}

void MeteredDriver::Unmap(Address address, uint64_t bytes) {
  inner_->Unmap(address, bytes);
  Note(History::Action::SEGMENT_UNMAP, device(), address, bytes);
}

}  // namespace cgp
