// Times each allocation and each free that torch asks its CUDA allocators for: for capture_parts.py, which compiles
// this. Nothing of torch's headers is needed: an allocator's first virtual function behind its two destructors is
// allocate(), and a DataPtr is {pointer, {deleter, context}, device}.
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

namespace {

using Deleter = void (*)(void*);
struct DataPtr {
  void* data;
  Deleter deleter;
  void* context;
  uint64_t device;
};
struct Call {
  int64_t begin;  // nanoseconds
  int64_t end;
  int64_t bytes;  // of a free: -1
};
// As the Itanium ABI passes a class that is returned in memory.
using Allocate = DataPtr* (*)(DataPtr* result, void* self, size_t bytes);

constexpr int kBefore = 2;  // words of a vtable in front of its first function
constexpr int kWords = 128;
constexpr int kAllocate = 2;
constexpr size_t kMost = 8;

std::vector<std::pair<void*, Allocate>> hooked;
std::array<Deleter, kMost> deleters{};  // that have a timed one
bool recording;
int depth;  // ours asks torch's: one call is recorded, not both
std::vector<Call> calls;

int64_t Now() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

template <size_t Number>
void TimedFree(void* context) {
  const int64_t begin = Now();
  deleters[Number](context);
  if (recording) calls.push_back({begin, Now(), -1});
}
template <size_t... Number>
constexpr std::array<Deleter, kMost> TimedFrees(std::index_sequence<Number...>) {
  return {TimedFree<Number>...};
}

Deleter Timed(Deleter deleter) {
  constexpr std::array<Deleter, kMost> timed = TimedFrees(std::make_index_sequence<kMost>());
  for (size_t i = 0; i < kMost; ++i) {
    if (deleters[i] == nullptr) deleters[i] = deleter;
    if (deleters[i] == deleter) return timed[i];
  }
  std::abort();
}

DataPtr* TimedAllocate(DataPtr* result, void* self, size_t bytes) {
  size_t which = 0;
  while (hooked[which].first != self) ++which;
  const int64_t begin = Now();
  ++depth;
  hooked[which].second(result, self, bytes);
  --depth;
  if (!recording || depth > 0) return result;
  calls.push_back({begin, Now(), static_cast<int64_t>(bytes)});
  if (result->deleter != nullptr && result->context == result->data) result->deleter = Timed(result->deleter);
  return result;
}

}  // namespace

extern "C" {

// From now on the calls to this c10::Allocator come by here.
void parts_hook(void* allocator) {
  void*** const object = static_cast<void***>(allocator);
  for (const auto& [known, allocate] : hooked) {
    if (known == allocator) return;
  }
  auto* const copy = new void*[kWords];
  std::memcpy(copy, *object - kBefore, sizeof(void*) * kWords);
  hooked.emplace_back(allocator, reinterpret_cast<Allocate>(copy[kBefore + kAllocate]));
  copy[kBefore + kAllocate] = reinterpret_cast<void*>(TimedAllocate);
  *object = copy + kBefore;
}
void parts_record(int on) {
  recording = on != 0;
  if (!recording) return;
  calls.clear();
  calls.reserve(1 << 20);
}
int64_t parts_now() { return Now(); }
int64_t parts_count() { return static_cast<int64_t>(calls.size()); }
const Call* parts_calls() { return calls.data(); }
}
