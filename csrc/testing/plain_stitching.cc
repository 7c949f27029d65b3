#include "testing/plain_stitching.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace cgp {
namespace {

constexpr uint64_t kGranule = 512;

bool Holds(const std::vector<uint32_t>& pages, uint32_t page) {
  return std::ranges::find(pages, page) != pages.end();
}

}  // namespace

void PlainStitching::BeginCapture() {
  for (const uint32_t changed : given_) {
    Page open;
    for (const Extent& extent : pages_[changed]) {
      if (!open.empty() && open.back().end == extent.begin) {
        open.back().end = extent.end;
      } else {
        open.push_back({extent.begin, extent.end, kAnybody});
      }
    }
    pages_[changed] = std::move(open);
  }
  given_.clear();
}

void PlainStitching::Allocate(uint64_t block, uint64_t bytes, uint64_t stream) {
  const uint64_t rounded = (bytes + kGranule - 1) / kGranule * kGranule;
  Pieces pieces;
  if (rounded < page_) {
    pieces = {PlaceSmall(rounded, stream)};
  } else {
    LookAtRooms(stream);
    pieces = PlaceLarge(rounded);
  }
  for (const Piece& piece : pieces) Take(piece);
  blocks_[block] = {std::move(pieces), stream};
}

void PlainStitching::Free(uint64_t block) {
  const auto node = blocks_.extract(block);
  for (const Piece& piece : node.mapped().pieces) Give(piece, node.mapped().stream);
}

// Step 1: the shortest stretch that holds the block, a whole page only where none else does.
PlainStitching::Piece PlainStitching::PlaceSmall(uint64_t bytes, uint64_t stream) {
  std::optional<Piece> best;
  for (uint32_t p = 0; p < pages_.size(); ++p) {
    const Page& page = pages_[p];
    for (std::size_t i = 0; i < page.size(); ++i) {
      Piece stretch{p, page[i].begin, page[i].begin};
      for (; i < page.size() && page[i].begin == stretch.end &&
             (page[i].stream == kAnybody || page[i].stream == stream);
           ++i) {
        stretch.end = page[i].end;
      }
      const uint64_t length = stretch.end - stretch.begin;
      if (length > 0) --i;  // what ended the stretch may begin another
      if (length >= bytes && (!best || length < best->end - best->begin)) best = stretch;
    }
  }
  if (!best) {
    if (ranges_.empty()) ranges_.emplace_back();
    rooms_.assign(pages_.size(), {});
    best = {static_cast<uint32_t>(pages_.size()), 0, 0};
    Append(1, std::nullopt, ranges_.back());
  }
  return {best->page, best->begin, best->begin + bytes};
}

// Steps 2 to 5.
PlainStitching::Pieces PlainStitching::PlaceLarge(uint64_t bytes) {
  const Stretch stretch = Shortest(bytes);
  Pieces pieces = FindMapped(bytes, stretch.whole + 1);
  if (pieces.empty()) {
    const uint64_t whole = WholePages({}).size();
    const uint64_t missing = stretch.whole - std::min(stretch.whole, whole);
    pieces = Extend(bytes, stretch.whole + 1, missing);
  }
  return pieces.empty() ? StartRange(bytes, stretch) : pieces;
}

// The least a block can make do with: the remainder lies in the shortest edge that holds it, or in
// the longest tail and head of two pages, or in a whole page more.
PlainStitching::Stretch PlainStitching::Shortest(uint64_t bytes) const {
  Stretch stretch{.tail = {}, .head = {}, .whole = bytes / page_};
  const uint64_t rest = bytes % page_;
  if (rest == 0) return stretch;
  const std::vector<uint32_t> tails = PartUsed(&Room::tail);
  const std::vector<uint32_t> heads = PartUsed(&Room::head);
  const auto holds = [&](uint64_t Room::*edge) {
    return [this, edge, rest](uint32_t page) { return rooms_[page].*edge >= rest; };
  };
  const auto tail = std::ranges::find_if(tails, holds(&Room::tail));
  const auto head = std::ranges::find_if(heads, holds(&Room::head));
  if (tail != tails.end() && (head == heads.end() || rooms_[*tail].tail <= rooms_[*head].head)) {
    stretch.tail = *tail;
    return stretch;
  }
  if (head != heads.end()) {
    stretch.head = *head;
    return stretch;
  }
  uint64_t longest = 0;
  for (const uint32_t first : tails) {
    for (std::size_t i = heads.size(); i-- > 0;) {
      if (heads[i] == first) continue;
      const uint64_t length = rooms_[first].tail + rooms_[heads[i]].head;
      if (length >= rest && length > longest) {
        longest = length;
        stretch.tail = first;
        stretch.head = heads[i];
      }
      break;
    }
  }
  if (longest == 0) ++stretch.whole;
  return stretch;
}

// Step 2: of all runs of free bytes in a range the one that gives up the fewest whole pages, and of
// those the shortest.
PlainStitching::Pieces PlainStitching::FindMapped(uint64_t bytes, uint64_t most_whole) const {
  const uint64_t rest = bytes % page_;
  const uint64_t full = bytes / page_;
  std::tuple least{most_whole + 1, uint64_t{0}};  // whole pages, length of the run
  const Range* in = nullptr;
  uint64_t at = 0;
  for (const Range& range : ranges_) {
    for (std::size_t first = 0, last = 0; first <= range.size(); first = last + 1) {
      last = first;
      while (last < range.size() && rooms_[range[last]].whole) ++last;
      const uint64_t tail = first > 0 ? rooms_[range[first - 1]].tail : 0;
      const uint64_t head = last < range.size() ? rooms_[range[last]].head : 0;
      const uint64_t whole = last - first;
      const uint64_t length = tail + whole * page_ + head;
      if (length < bytes) continue;
      uint64_t taken = full + (rest > 0 ? 1 : 0);
      uint64_t start = first * page_;
      if (whole * page_ < bytes && whole <= full) {
        taken = whole;
        start -= std::min(tail, bytes - whole * page_);
      } else if (rest > 0 && tail >= rest && (head < rest || tail <= head)) {
        taken = full;
        start -= rest;
      } else if (rest > 0 && head >= rest) {
        taken = full;
        start = (last - full) * page_;
      }
      if (std::tuple{taken, length} < least) {
        least = {taken, length};
        in = &range;
        at = start;
      }
    }
  }
  return in == nullptr ? Pieces{} : PiecesFrom(*in, at, bytes);
}

// Step 3: behind the range whose free end saves the most mappings, where that asks the driver for no
// more pages than a new range would.
PlainStitching::Pieces PlainStitching::Extend(uint64_t bytes, uint64_t most_whole,
                                              uint64_t most_new) {
  const std::vector<uint32_t> heads = PartUsed(&Room::head);
  Range* best = nullptr;
  uint64_t least = ~uint64_t{0};  // mappings
  uint64_t reused = 0;
  Stretch stretch;
  for (Range& range : ranges_) {
    uint64_t whole = 0;
    while (whole < range.size() && rooms_[range[range.size() - 1 - whole]].whole) ++whole;
    const uint64_t edge = whole < range.size() ? rooms_[range[range.size() - 1 - whole]].tail : 0;
    const uint64_t free = whole * page_ + edge;
    if (free == 0 || free >= bytes) continue;
    Stretch missing{.tail = {}, .head = {}, .whole = (bytes - free) / page_};
    if (const uint64_t rest = (bytes - free) % page_; rest > 0) {
      const auto head = std::ranges::find_if(
          heads, [&](uint32_t page) { return rooms_[page].head >= rest && !Holds(range, page); });
      if (head != heads.end()) {
        missing.head = *head;
      } else {
        ++missing.whole;
      }
    }
    const uint64_t mappings = missing.whole + (missing.head ? 1 : 0);
    if (whole + missing.whole > most_whole || mappings >= least) continue;
    const uint64_t others = WholePages(range).size();
    if (missing.whole > others + most_new) continue;
    best = &range;
    least = mappings;
    reused = free;
    stretch = missing;
  }
  if (best == nullptr) return {};
  const uint64_t start = best->size() * page_ - reused;
  Append(stretch.whole, stretch.head, *best);
  return PiecesFrom(*best, start, bytes);
}

// Step 4.
PlainStitching::Pieces PlainStitching::StartRange(uint64_t bytes, const Stretch& stretch) {
  Range& range = ranges_.emplace_back();
  uint64_t start = 0;
  if (stretch.tail) {
    range.push_back(*stretch.tail);
    ++mappings_;
    start = page_ - std::min(rooms_[*stretch.tail].tail, bytes - stretch.whole * page_);
  }
  Append(stretch.whole, stretch.head, range);
  return PiecesFrom(range, start, bytes);
}

void PlainStitching::LookAtRooms(uint64_t stream) {
  rooms_.assign(pages_.size(), {});
  for (uint32_t p = 0; p < pages_.size(); ++p) {
    Room& room = rooms_[p];
    uint64_t tail_begin = page_;
    for (const Extent& extent : pages_[p]) {
      if (extent.stream != kAnybody && extent.stream != stream) continue;
      if (extent.begin == room.head) room.head = extent.end;
    }
    for (auto extent = pages_[p].rbegin(); extent != pages_[p].rend(); ++extent) {
      if (extent->stream != kAnybody && extent->stream != stream) break;
      if (extent->end == tail_begin) tail_begin = extent->begin;
    }
    room.tail = page_ - tail_begin;
    room.whole = room.head == page_;
  }
}

// Those that have such an edge, the shortest first.
std::vector<uint32_t> PlainStitching::PartUsed(uint64_t Room::*edge) const {
  std::vector<uint32_t> pages;
  for (uint32_t p = 0; p < rooms_.size(); ++p) {
    if (!rooms_[p].whole && rooms_[p].*edge > 0) pages.push_back(p);
  }
  std::ranges::stable_sort(pages, {}, [&](uint32_t page) { return rooms_[page].*edge; });
  return pages;
}

std::vector<uint32_t> PlainStitching::WholePages(const Range& but) const {
  std::vector<bool> shown(rooms_.size());
  for (const uint32_t page : but) shown[page] = true;
  std::vector<uint32_t> pages;
  for (uint32_t p = 0; p < rooms_.size(); ++p) {
    if (rooms_[p].whole && !shown[p]) pages.push_back(p);
  }
  return pages;
}

// Step 5: what whole pages are missing is made.
void PlainStitching::Append(uint64_t whole, std::optional<uint32_t> head, Range& range) {
  std::vector<uint32_t> pages = WholePages(range);
  while (pages.size() < whole) {
    pages.push_back(static_cast<uint32_t>(pages_.size()));
    pages_.push_back({{0, page_, kAnybody}});
  }
  pages.resize(whole);
  if (head) pages.push_back(*head);
  range.insert(range.end(), pages.begin(), pages.end());
  mappings_ += pages.size();
}

PlainStitching::Pieces PlainStitching::PiecesFrom(const Range& range, uint64_t start,
                                                  uint64_t bytes) const {
  Pieces pieces;
  for (const uint64_t end = start + bytes; start < end;) {
    const uint64_t slot = start / page_;
    const uint64_t next = std::min(end, (slot + 1) * page_);
    pieces.push_back({range[slot], start - slot * page_, next - slot * page_});
    start = next;
  }
  return pieces;
}

void PlainStitching::Take(const Piece& piece) {
  Page left;
  for (const Extent& extent : pages_[piece.page]) {
    if (extent.begin < std::min(extent.end, piece.begin)) {
      left.push_back({extent.begin, std::min(extent.end, piece.begin), extent.stream});
    }
    if (std::max(extent.begin, piece.end) < extent.end) {
      left.push_back({std::max(extent.begin, piece.end), extent.end, extent.stream});
    }
  }
  pages_[piece.page] = std::move(left);
}

void PlainStitching::Give(const Piece& piece, uint64_t stream) {
  given_.push_back(piece.page);
  Page& page = pages_[piece.page];
  auto at = std::ranges::lower_bound(page, piece.begin, {}, &Extent::begin);
  at = page.insert(at, {piece.begin, piece.end, stream});
  if (const auto next = at + 1;
      next != page.end() && next->begin == at->end && next->stream == stream) {
    at->end = next->end;
    at = page.erase(next) - 1;
  }
  if (at != page.begin() && (at - 1)->end == at->begin && (at - 1)->stream == stream) {
    (at - 1)->end = at->end;
    page.erase(at);
  }
}

}  // namespace cgp
