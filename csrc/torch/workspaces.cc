#include "torch/workspaces.h"

#include <mutex>

namespace cgp {
namespace {

using Held = std::shared_ptr<Workspace>;

[[maybe_unused]] at::DataPtr& DataOf(at::DataPtr& data) { return data; }
[[maybe_unused]] at::DataPtr& DataOf(SizedWorkspace& workspace) { return workspace.first; }
[[maybe_unused]] size_t SizeOf(const at::DataPtr& /*data*/, size_t bytes) { return bytes; }
[[maybe_unused]] size_t SizeOf(const SizedWorkspace& workspace, size_t /*bytes*/) {
  return workspace.second;
}
[[maybe_unused]] void SetSize(at::DataPtr& /*to*/, const at::DataPtr& /*from*/) {}
[[maybe_unused]] void SetSize(SizedWorkspace& to, const SizedWorkspace& from) {
  to.second = from.second;
}

// The bytes of `from` for a map. They hold `held`, which owns them now or soon.
Workspace Share(const Held& held, Workspace& from) {
  const at::DataPtr& data = DataOf(from);
  Workspace shared;
  SetSize(shared, from);
  DataOf(shared) = at::DataPtr(
      data.get(), new Held(held), [](void* context) { delete static_cast<Held*>(context); },
      data.device());
  return shared;
}

// What graphs hold of one map, as long as they do.
class Holder {
 public:
  // Freeing a workspace may wait for what the holder of the map's lock waits for, so what may end
  // here goes to `until_unlocked`. pre: the map is locked.
  void Hold(WorkspaceMap& in, uintptr_t stream, std::vector<Held>& all,
            std::vector<Held>& until_unlocked) {
    std::erase_if(held_, [](const auto& entry) { return entry.second.expired(); });
    for (const auto& [key, weak] : held_) {
      if (!IsOf(stream, key) || in.map.contains(key)) continue;
      const Held& held = until_unlocked.emplace_back(weak.lock());
      if (held != nullptr) in.map.emplace(key, Share(held, *held));
    }
    for (auto& [key, workspace] : in.map) {
      if (!IsOf(stream, key)) continue;
      std::weak_ptr<Workspace>& weak = held_[key];
      Held& held = until_unlocked.emplace_back(weak.lock());
      if (held == nullptr || DataOf(*held).get() != DataOf(workspace).get()) {
        weak = all.emplace_back(Take(workspace));
      } else {
        all.push_back(held);
      }
    }
  }

 private:
  using Key = std::tuple<void*, void*>;
  static bool IsOf(uintptr_t stream, const Key& key) {
    return reinterpret_cast<uintptr_t>(std::get<1>(key)) == stream;
  }

  // Takes over the map's workspace. Afterwards the map shares its bytes.
  static Held Take(Workspace& from) {
    auto held = std::make_shared<Workspace>();
    SetSize(*held, from);
    Workspace shared = Share(held, from);
    std::swap(DataOf(*held), DataOf(from));  // nothing fails from here on
    from = std::move(shared);
    return held;
  }

  std::map<Key, std::weak_ptr<Workspace>> held_;
};

}  // namespace

std::vector<std::tuple<uintptr_t, size_t, uintptr_t>> BlasWorkspaces() {
  std::vector<std::tuple<uintptr_t, size_t, uintptr_t>> found;
  for (const bool of_cublaslt : {false, true}) {
    const auto [of, bytes] = FindWorkspaces(of_cublaslt);
    if (of == nullptr) continue;
    const std::shared_lock lock(of->mutex);
    for (auto& [key, workspace] : of->map) {
      found.emplace_back(reinterpret_cast<uintptr_t>(DataOf(workspace).get()),
                         SizeOf(workspace, bytes()), reinterpret_cast<uintptr_t>(std::get<1>(key)));
    }
  }
  return found;
}

void FreeWorkspaces(const std::function<bool(uintptr_t)>& goes) {
  for (const bool of_cublaslt : {false, true}) {
    WorkspaceMap* const of = FindWorkspaces(of_cublaslt).workspaces;
    if (of == nullptr) continue;
    decltype(of->map) taken;  // freed when the map is not locked any more
    const std::unique_lock lock(of->mutex);
    for (auto next = of->map.begin(); next != of->map.end();) {
      const auto entry = next++;
      const auto address = reinterpret_cast<uintptr_t>(DataOf(entry->second).get());
      if (goes(address)) taken.insert(of->map.extract(entry));
    }
  }
}

std::vector<std::shared_ptr<Workspace>> HoldWorkspaces(uintptr_t stream) {
  static std::mutex mutex;
  static Holder holders[2];
  std::vector<Held> all, until_unlocked;
  const std::lock_guard lock(mutex);
  for (const bool of_cublaslt : {false, true}) {
    WorkspaceMap* const of = FindWorkspaces(of_cublaslt).workspaces;
    if (of == nullptr) continue;
    const std::unique_lock map_lock(of->mutex);
    holders[of_cublaslt].Hold(*of, stream, all, until_unlocked);
  }
  return all;
}

}  // namespace cgp
