// Leases in the naive model: who has which page, and what graphs need.
#include <algorithm>
#include <string>
#include <utility>

#include "testing/pool_model.h"

namespace cgp {

void PoolModel::Touch(std::map<Address, uint32_t>& pages, const LiveBlock& block) const {
  Address page = block.block.address - block.pieces.front().offset_bytes;
  for (const PhysicalPiece& piece : block.pieces) {
    pages[page] = Index(piece.page);
    page += page_bytes_;
  }
}

void PoolModel::Recount(ModelPool& pool) const {
  const auto lent = std::ranges::count(pool.leases, kLent, kValue);
  pool.stats.pages = pool.pages.size() - pool.away - static_cast<uint64_t>(lent);
  pool.stats.reserved_bytes = pool.stats.pages * page_bytes_;
  pool.stats.peak_reserved_bytes =
      std::max(pool.stats.peak_reserved_bytes, pool.stats.reserved_bytes);
  pool.stats.away_bytes = pool.away * page_bytes_;
  const auto unnamed = std::ranges::count(pool.graphs, uint64_t{0}, &Capture::name);
  pool.stats.unnamed_captures = static_cast<uint64_t>(unnamed);
}

uint64_t PoolModel::LeaseOf(PoolId id, uint32_t page) const {
  const auto found = Find(id)->leases.find(page);
  return found == Find(id)->leases.end() ? 0 : found->second;
}

uint64_t PoolModel::PagesWith(PoolId id, uint64_t lease) const {
  return static_cast<uint64_t>(std::ranges::count_if(
      Find(id)->leases, [&](uint64_t one) { return lease == 0 ? one != kLent : one == lease; },
      kValue));
}

bool PoolModel::AnyAway(const LiveBlock& block) const {
  return std::ranges::any_of(block.pieces, [&](const PhysicalPiece& piece) {
    return LeaseOf(block.pool, Index(piece.page)) != 0;
  });
}

std::vector<uint32_t> PoolModel::PagesAt(PoolId id, const LiveBlock& block) const {
  std::map<Address, uint32_t> then;
  Touch(then, block);
  std::vector<uint32_t> pages;
  pages.reserve(then.size());
  for (const auto& [address, page] : then) pages.push_back(Find(id)->kept.at(address));
  return pages;
}

void PoolModel::LearnHandles(PoolId id, const std::map<uint32_t, uint32_t>& first_pages) {
  for (const auto& [page, first] : first_pages) Known(id).first_page[page] = first;
}

PoolModel::Pages32 PoolModel::PagesOf(
    PoolId id, const std::function<bool(const std::set<uint64_t>&)>& goes) const {
  const ModelPool& pool = *Find(id);
  std::map<uint32_t, std::set<uint64_t>> labels;  // by the handle's first page
  for (const auto& [number, page] : pool.pages) {
    if (pool.leases.contains(number)) continue;
    std::set<uint64_t>& of = labels[pool.first_page.at(number)];
    for (const Granule& granule : page) {
      if (granule.label != 0) of.insert(granule.label);
    }
  }
  std::erase_if(labels, [&](const auto& entry) { return !goes(entry.second); });
  Pages32 pages;
  for (const auto& [number, first] : pool.first_page) {
    if (labels.contains(first)) pages.insert(number);
  }
  return pages;
}

void PoolModel::Quiesced(PoolId id) {
  ModelPool& pool = Known(id);
  for (auto& [number, page] : pool.pages) {
    for (Granule& granule : page) granule.fence = nullptr;
  }
  pool.unmarked.clear();
  pool.held.reset();
  pool.stream_fences.clear();
  pool.replays.clear();
}

void PoolModel::Evict(PoolId id, const Pages32& pages, uint64_t lease) {
  ModelPool& pool = Known(id);
  Quiesced(id);
  for (const uint32_t number : pages) {
    pool.leases[number] = lease;
    for (Granule& granule : pool.pages.at(number)) granule.leased = true;
    pool.captured_pages = pool.pages.size();
  }
}

// What was hidden is everyone's, behind whatever the lease was used for.
void PoolModel::Return(ModelPool& pool, uint32_t page) {
  pool.leases.erase(page);
  for (Granule& granule : pool.pages.at(page)) {
    granule.leased = false;
    granule.captured = true;
    if (granule.label == 0) granule.fence = nullptr;
  }
  pool.captured_pages = pool.pages.size();
}

void PoolModel::BringBack(PoolId id, uint64_t lease) {
  ModelPool& pool = Known(id);
  const auto leases = pool.leases;
  for (const auto& [page, one] : leases) {
    if (one == lease) Return(pool, page);
  }
  if (lease == kAsleep) pool.asleep = false;
}

void PoolModel::SetAway(PoolId id, uint64_t pages) {
  Known(id).away = pages;
  Known(id).numbering = next_incarnation_++;
  Recount(Known(id));
}

std::string PoolModel::FollowLender(PoolId id, const Pages32& gone) {
  ModelPool& pool = Known(id);
  bool any_back = false;
  for (auto& [number, page] : pool.pages) {
    const uint64_t lease = LeaseOf(id, number);
    if (lease != 0 && lease != kLent) continue;
    const bool moves = gone.contains(number) == (lease == 0);
    if (moves && IsEager(pool)) return "lends or takes back pages while eager work goes on";
    if (gone.contains(number) && lease == 0) {
      const auto left_it = [page_left = number](const Capture& one) {
        return std::ranges::count(one.left, page_left, kValue) > 0;
      };
      if (std::ranges::any_of(pool.graphs, left_it)) return "lends what a capture has left";
      for (Granule& granule : page) {
        if (granule.label != 0) return "lends a page in which a block lives";
        granule.leased = true;
      }
      pool.leases[number] = kLent;
      pool.captured_pages = pool.pages.size();
    } else if (!gone.contains(number) && lease == kLent) {
      Return(pool, number);
      any_back = true;
    }
  }
  Recount(pool);
  if (!any_back || !HasLoan(id)) return {};
  ModelPool& loan = Known(LoanOf(id));
  loan.withdrawn = loan.scope.has_value();
  for (const auto& [stream, work] : watch_.TakeMark()) {
    pool.borrowers.push_back({stream, work});
    pool.replays.push_back({stream, work});
  }
  return {};
}

std::string PoolModel::FollowLoan(PoolId id, uint64_t pages, const Pages32& gone,
                                  const PiecesOf& pieces_of) {
  ModelPool& loan = FindOrCreate(id);
  if (pages < loan.pages.size()) {
    loan.leases.clear();
    std::string complaint = Shrink(id, pages, pieces_of);
    if (!complaint.empty()) return complaint;
  }
  bool any_new = false;
  for (uint32_t number = 0; number < pages; ++number) {
    const bool is_new = !loan.pages.contains(number);
    std::vector<Granule>& page = loan.pages[number];
    page.resize(granules_per_page_);
    if (gone.contains(number)) {
      loan.leases[number] = kLent;
      for (Granule& granule : page) {
        if (granule.label != 0) return "gives back a page in which a borrowed block lives";
        granule.leased = true;
      }
    } else if (is_new || loan.leases.contains(number)) {
      Return(loan, number);
      any_new = true;
    }
  }
  Recount(loan);
  if (!any_new) return {};
  // Behind all that the device had been given when it was lent.
  for (const auto& [stream, work] : watch_.TakeMark()) loan.replays.push_back({stream, work});
  return {};
}

void PoolModel::Renew(PoolId loan) {
  EndScope(loan, /*may_mark=*/true);
  BeginScope(loan, ScopeKind::kLoan, /*may_mark=*/true);
  Known(loan).withdrawn = false;
}

std::string PoolModel::Keep(PoolId id, bool has_graphs, const Pages32& lent,
                            const PiecesOf& pieces_of) {
  ModelPool& pool = Known(id);
  if (!has_graphs) {
    pool.incarnation = next_incarnation_++;
    pool.graphs.clear();
    pool.kept.clear();
    pool.may_name = false;
  }
  for (const auto& [page, lease] : std::map(pool.leases)) {
    if (lease == kLent && !lent.contains(page)) Return(pool, page);
  }
  Recount(pool);            // which may be a peak
  std::set<uint32_t> stay;  // handles
  const auto keep = [&](uint32_t page) { stay.insert(pool.first_page.at(page)); };
  for (const auto& [address, block] : live_) {
    if (block.pool != id) continue;
    for (const PhysicalPiece& piece : block.pieces) keep(Index(piece.page));
  }
  for (const auto& [address, page] : NeedsOf(id, {}, /*more=*/true)) keep(page);
  std::ranges::for_each(lent, keep);
  const auto before = std::exchange(pool.pages, {});
  const auto leases = std::exchange(pool.leases, {});
  const auto first_page = std::exchange(pool.first_page, {});
  std::map<uint32_t, uint32_t> now;
  for (const auto& [page, granules] : before) {
    if (!stay.contains(first_page.at(page))) continue;
    const auto number = static_cast<uint32_t>(now.size());
    now[page] = number;
    pool.pages[number] = granules;
    pool.first_page[number] = now.at(first_page.at(page));
    if (leases.contains(page)) pool.leases[number] = leases.at(page);
  }
  for (Capture& one : pool.graphs) {
    for (auto* const pages : {&one.pages, &one.left}) {
      for (auto& [address, page] : *pages) page = now.at(page);
    }
  }
  for (auto& [address, page] : pool.kept) page = now.at(page);
  pool.numbering = next_incarnation_++;
  pool.away = std::min(pool.away, PagesWith(id, 0));
  if (pool.asleep) pool.asleep = PagesWith(id, kAsleep) > 0;
  for (auto& [address, block] : live_) {
    if (block.pool != id) continue;
    const auto told = pieces_of(address);
    for (size_t i = 0; i < block.pieces.size(); ++i) {
      PhysicalPiece& piece = block.pieces[i];
      piece.page = PageId{now.at(Index(piece.page))};
      if (i >= told.size() || told[i].page != piece.page) return "a block has other pages";
    }
  }
  return {};
}

std::vector<uint64_t> PoolModel::Graphs(PoolId id) const {
  std::vector<uint64_t> names;
  if (!Contains(id) || UseCount(id) == 0 || OpenScope(id)) return names;
  for (const Capture& one : Find(id)->graphs) {
    if (!one.gone) names.push_back(one.name);
  }
  return names;
}

void PoolModel::Name(PoolId id, uint64_t name) {
  Known(id).graphs.back().name = name;
  Known(id).may_name = false;
  Recount(Known(id));
}

void PoolModel::Drop(PoolId id, uint64_t name) {
  if (name == 0) return;
  std::erase_if(Known(id).graphs, [&](const Capture& one) { return one.name == name; });
}

std::map<Address, uint32_t> PoolModel::NeedsOf(PoolId id, std::optional<uint64_t> name,
                                               bool more) const {
  std::map<Address, uint32_t> needs;
  for (const Capture& one : Find(id)->graphs) {
    if ((!name || one.name == *name) && (more || !one.gone)) {
      needs.insert(one.pages.begin(), one.pages.end());
    }
  }
  if (more && name.value_or(0) == 0) needs.insert(Find(id)->kept.begin(), Find(id)->kept.end());
  return needs;
}

std::vector<std::pair<StreamId, uint64_t>> PoolModel::Borrowers(PoolId id) const {
  std::vector<std::pair<StreamId, uint64_t>> work;
  for (const Pending& one : Find(id)->borrowers) work.emplace_back(one.stream, one.work);
  return work;
}

std::map<uint64_t, uint64_t> PoolModel::Idle(PoolId id, uint32_t page) const {
  std::map<uint64_t, uint64_t> idle;
  if (!Contains(id) || !Find(id)->pages.contains(page)) return idle;
  const std::vector<Granule>& granules = Find(id)->pages.at(page);
  for (uint64_t i = 0; i < granules.size(); ++i) {
    const Fence* const fence = granules[i].fence.get();
    const bool done =
        fence == nullptr || std::ranges::all_of(fence->pending, [&](const Pending& pending) {
          return watch_.Done(pending.stream, pending.work);
        });
    if (granules[i].label == 0 && done) idle.emplace(i, granules[i].blocks);
  }
  return idle;
}

}  // namespace cgp
