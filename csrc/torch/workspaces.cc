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

// What the map gets in place of what is held: the same bytes.
Workspace Lend(const Held& held) {
  const at::DataPtr& data = DataOf(*held);
  Workspace lent;
  SetSize(lent, *held);
  DataOf(lent) = at::DataPtr(
      data.get(), new Held(held), [](void* context) { delete static_cast<Held*>(context); },
      data.device());
  return lent;
}

// Of one map: what graphs hold of it, as long as they do.
class Holder {
 public:
  // pre: the map is locked.
  void Restore(WorkspaceMap& from) {
    std::erase_if(held_, [](const auto& entry) { return entry.second.expired(); });
    for (const auto& [key, weak] : held_) {
      const Held held = weak.lock();
      if (held != nullptr && !from.map.contains(key)) from.map.emplace(key, Lend(held));
    }
  }

  // pre: as above.
  void Hold(WorkspaceMap& from, uintptr_t stream, std::vector<Held>& all) {
    for (auto& [key, workspace] : from.map) {
      if (reinterpret_cast<uintptr_t>(std::get<1>(key)) != stream) continue;
      std::weak_ptr<Workspace>& weak = held_[key];
      Held held = weak.lock();
      if (held == nullptr || DataOf(*held).get() != DataOf(workspace).get()) {
        held = std::make_shared<Workspace>();
        SetSize(*held, workspace);
        std::swap(DataOf(*held), DataOf(workspace));
        weak = held;
        workspace = Lend(held);
      }
      all.push_back(std::move(held));
    }
  }

 private:
  std::map<std::tuple<void*, void*>, std::weak_ptr<Workspace>> held_;
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
                         SizeOf(workspace, bytes), reinterpret_cast<uintptr_t>(std::get<1>(key)));
    }
  }
  return found;
}

std::vector<std::shared_ptr<Workspace>> HoldWorkspaces(uintptr_t stream) {
  static std::mutex mutex;
  static Holder holders[2];
  std::vector<Held> all;
  const std::lock_guard lock(mutex);
  for (const bool of_cublaslt : {false, true}) {
    WorkspaceMap* const of = FindWorkspaces(of_cublaslt).workspaces;
    if (of == nullptr) continue;
    const std::unique_lock map_lock(of->mutex);
    holders[of_cublaslt].Restore(*of);
    holders[of_cublaslt].Hold(*of, stream, all);
  }
  return all;
}

}  // namespace cgp
