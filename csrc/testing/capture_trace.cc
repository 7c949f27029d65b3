#include "testing/capture_trace.h"

#include <algorithm>
#include <fstream>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <unordered_map>

#include "testing/text.h"

namespace cgp {
namespace {

using Kind = TraceEvent::Kind;

// How a line begins, and which numbers follow.
struct Form {
  std::string_view word;
  Kind kind;
  std::vector<uint64_t TraceEvent::*> numbers;
};
const std::vector<Form> kForms{
    {"alloc", Kind::kAllocate, {&TraceEvent::block, &TraceEvent::bytes, &TraceEvent::stream}},
    {"free", Kind::kFree, {&TraceEvent::block}},
    {"use", Kind::kUse, {&TraceEvent::block, &TraceEvent::stream}},
    {"launch", Kind::kLaunch, {&TraceEvent::stream}},
    {"wait", Kind::kWait, {&TraceEvent::stream, &TraceEvent::other}},
};

std::optional<TraceEvent> ReadEvent(const std::string& word, std::istream& words) {
  const auto form = std::ranges::find(kForms, word, &Form::word);
  if (form == kForms.end()) return std::nullopt;
  TraceEvent event{.kind = form->kind};
  for (const auto number : form->numbers) words >> event.*number;
  if (event.kind == Kind::kAllocate && event.bytes == 0) return std::nullopt;
  return event;
}

}  // namespace

CaptureTrace ReadTrace(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot read " + path);
  CaptureTrace trace;
  uint64_t number = 0;
  for (std::string line; std::getline(file, line);) {
    ++number;
    std::istringstream words(line);
    std::string what;
    words >> what;
    if (what == "graph") {
      words >> trace.emplace_back().key;
    } else if (const auto event = ReadEvent(what, words); event && !trace.empty()) {
      trace.back().events.push_back(*event);
    } else {
      words.setstate(std::ios::failbit);
    }
    if (!words)
      throw std::runtime_error(Text(path, ": line ", number, " is not of a trace: ", line));
  }
  return trace;
}

CaptureTrace InOrder(const CaptureTrace& trace, const std::vector<std::size_t>& places) {
  if (std::ranges::is_sorted(places)) return trace;
  std::unordered_map<uint64_t, std::size_t> born;  // place of each block's graph
  for (std::size_t place = 0; place < trace.size(); ++place) {
    for (const TraceEvent& event : trace[place].events) {
      if (event.kind == Kind::kAllocate) born[event.block] = place;
    }
  }
  std::vector<std::size_t> position(places.size());
  for (std::size_t i = 0; i < places.size(); ++i) position[places[i]] = i;
  std::vector<std::vector<TraceEvent>> own(places.size());
  CaptureTrace ordered(places.size() + 1);  // frees behind the last graph never happen
  for (std::size_t place = 0; place < trace.size(); ++place) {
    ordered[position[place]].key = trace[place].key;
    for (const TraceEvent& event : trace[place].events) {
      const std::size_t home = event.kind == Kind::kFree ? born.at(event.block) : place;
      if (home == place) {
        own[position[place]].push_back(event);
      } else {
        ordered[position[home] + 1].events.push_back(event);
      }
    }
  }
  ordered.pop_back();
  for (std::size_t i = 0; i < ordered.size(); ++i) {
    ordered[i].events.insert(ordered[i].events.end(), own[i].begin(), own[i].end());
  }
  return ordered;
}

uint64_t MostLiveBytes(const CaptureTrace& trace) {
  constexpr uint64_t kGranule = 512;
  std::unordered_map<uint64_t, uint64_t> live;
  uint64_t sum = 0;
  uint64_t most = 0;
  for (const TraceGraph& graph : trace) {
    for (const TraceEvent& event : graph.events) {
      if (event.kind == Kind::kAllocate) {
        sum += live[event.block] = (event.bytes + kGranule - 1) / kGranule * kGranule;
        most = std::max(most, sum);
      } else if (event.kind == Kind::kFree) {
        sum -= live.at(event.block);
        live.erase(event.block);
      }
    }
  }
  return most;
}

}  // namespace cgp
