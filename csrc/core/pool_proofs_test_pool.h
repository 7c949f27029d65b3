// What the tests of captures of several streams share: a pool whose streams capture graphs on the
// host, and which is checked after each step.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <initializer_list>
#include <map>
#include <ostream>
#include <sstream>
#include <string>
#include <vector>

#include "core/pool.h"
#include "core/pool_test_pool.h"
#include "testing/host_driver.h"

namespace cgp {

inline constexpr StreamId kD{4};

class PoolProofsTest : public PoolTest {
 protected:
  // Begins a scope of the pool and, as PyTorch does, then a capture.
  CaptureId Begin(std::initializer_list<StreamId> streams) {
    pool_.BeginScope(ScopeKind::kCapture);
    return BeginCapture(streams);
  }
  // On the first stream, which the others join before anything is captured.
  CaptureId BeginCapture(std::initializer_list<StreamId> streams) {
    const CaptureId capture = graphs_.Begin(*streams.begin());
    for (const StreamId stream : streams) Join(stream, *streams.begin());
    return capture;
  }
  // Ends the capture and then the scope.
  void End(CaptureId capture) {
    graphs_.End(capture);
    EndScope();
  }
  void EndScope() {
    pool_.EndScope();
    pool_.Check();
  }

  Block Allocate(uint64_t bytes, StreamId stream) {
    const Block block = PoolTest::Allocate(bytes, stream);
    pool_.Check();
    return block;
  }
  void Free(const Block& block) {
    pool_.Free(block.address);
    pool_.Check();
  }
  void Use(const Block& block, StreamId stream) {
    pool_.RecordUse(block.address, stream);
    pool_.Check();
  }
  // Whether a block gets memory that the pool has already. It lives on.
  bool Reuses(uint64_t bytes, StreamId stream) {
    const uint64_t pages = pool_.Stats().pages;
    Allocate(bytes, stream);
    return pool_.Stats().pages == pages;
  }

  GraphNode Launch(StreamId stream) { return graphs_.Launch(stream); }
  // The stream waits for all that the other one has captured.
  void Join(StreamId stream, StreamId other) { Wait(stream, Record(other)); }
  Frontier Record(StreamId stream) const { return graphs_.Record(stream); }
  void Wait(StreamId stream, const Frontier& event) { graphs_.Wait(stream, event); }

  // What streams do in captures, as a text. Streams are A to D, sizes a page or so many pages
  // ("2p") or granules ("9g"), and what stands in brackets is a remark. Each statement ends with a
  // semicolon:
  //   capture A B    a scope begins, then a capture of A, which B joins
  //   body C         another capture in the same scope; "body ends" ends it
  //   end            the last capture ends, then the scope
  //   eager          a scope of eager work; "scope begins" and "scope ends" say a scope's alone, and
  //                  "capture ends" a capture's end
  //   a b = A 2p     A gets a block a and a block b
  //   free a b       in this order
  //   B uses a       by record_stream()
  //   A launches     "early": programmatically
  //   e marks A      an event; "B waits e" or, for what A has captured by now, "B waits A"
  //   A works        what is not captured; "done" when it is over
  //   A reuses 2p    gets memory that the pool has already, and keeps it; else "A grows 2p"
  //   invalidate     the last capture
  //   pages 3        that the pool has by now; "events 0" that the driver has
  //   checkpoint c   "restore c" goes back to it
  //   a shares b     bytes of the block b, of now or of before; else "a avoids b"
  //   held a         C gets nothing of what was a before all work is done, and all of it then
  void Play(const std::string& script) {
    std::istringstream statements(script);
    for (std::string statement; std::getline(statements, statement, ';');) {
      SCOPED_TRACE(statement);
      std::istringstream text(statement.substr(0, statement.find('(')));
      std::vector<std::string> words;
      for (std::string word; text >> word;) words.push_back(word);
      if (!words.empty()) Do(words);
    }
  }

  HostGraphs& graphs_ = host_.graphs();

 private:
  using Words = std::vector<std::string>;

  static StreamId StreamOf(const std::string& word) {
    return StreamId{static_cast<uint64_t>(word.at(0) - 'A' + 1)};
  }
  static uint64_t SizeOf(const Words& words, std::size_t at) {
    if (at >= words.size()) return kPage;
    return std::stoul(words[at]) * (words[at].back() == 'p' ? kPage : kGranule);
  }
  CaptureId CaptureOn(const Words& words) {
    const CaptureId capture = graphs_.Begin(StreamOf(words.at(1)));
    for (std::size_t i = 2; i < words.size(); ++i) Join(StreamOf(words[i]), StreamOf(words[1]));
    return capture;
  }
  void EndLastCapture() {
    graphs_.End(captures_.back());
    captures_.pop_back();
  }

  void Do(const Words& words) {
    const std::string& first = words.front();
    const std::string verb = words.size() > 1 ? words[1] : "";
    const auto sign = std::ranges::find(words, "=");
    if (first == "capture" && verb != "ends") {
      pool_.BeginScope(ScopeKind::kCapture);
      captures_.push_back(CaptureOn(words));
    } else if (first == "body" && verb != "ends") {
      captures_.push_back(CaptureOn(words));
    } else if (first == "body" || first == "capture") {
      EndLastCapture();
    } else if (first == "end") {
      EndLastCapture();
      EndScope();
    } else if (first == "eager") {
      pool_.BeginScope(ScopeKind::kEager);
    } else if (first == "scope" && verb == "begins") {
      pool_.BeginScope(ScopeKind::kCapture);
    } else if (first == "scope") {
      EndScope();
    } else if (first == "invalidate") {
      graphs_.Invalidate(captures_.back());
    } else if (first == "done") {
      watch_.FinishAll();
    } else if (first == "events") {
      EXPECT_EQ(watch_.events(), std::stoul(verb));
    } else if (first == "checkpoint") {
      checkpoints_[verb] = pool_.Checkpoint();
    } else if (first == "restore") {
      pool_.Restore(checkpoints_.at(verb));
      pool_.Check();
    } else if (first == "held") {
      ExpectHeldUntilWorkIsDone(pieces_.at(verb));
    } else if (verb == "shares" || verb == "avoids") {
      EXPECT_EQ(Overlap(pieces_.at(first), pieces_.at(words.at(2))), verb == "shares");
    } else if (first == "pages") {
      EXPECT_EQ(pool_.Stats().pages, std::stoul(verb));
    } else if (first == "free") {
      for (std::size_t i = 1; i < words.size(); ++i) Free(blocks_.at(words[i]));
    } else if (sign != words.end()) {
      const auto names = static_cast<std::size_t>(sign - words.begin());
      for (std::size_t i = 0; i < names; ++i) {
        const Block block = Allocate(SizeOf(words, names + 2), StreamOf(words.at(names + 1)));
        blocks_[words[i]] = block;
        pieces_[words[i]] = pool_.Pieces(block.address);
      }
    } else if (verb == "uses") {
      Use(blocks_.at(words.at(2)), StreamOf(first));
    } else if (verb == "launches") {
      graphs_.Launch(StreamOf(first), words.size() > 2 ? HostGraphs::LaunchKind::kProgrammatic
                                                       : HostGraphs::LaunchKind::kPlain);
    } else if (verb == "marks") {
      events_[first] = Record(StreamOf(words.at(2)));
    } else if (verb == "waits") {
      const auto event = events_.find(words.at(2));
      Wait(StreamOf(first), event == events_.end() ? Record(StreamOf(words[2])) : event->second);
    } else if (verb == "works") {
      watch_.Submit(StreamOf(first));
    } else if (verb == "reuses" || verb == "grows") {
      EXPECT_EQ(Reuses(SizeOf(words, 2), StreamOf(first)), verb == "reuses");
    } else {
      ADD_FAILURE() << "no such statement";
    }
  }

  // pre: no block lives on these bytes.
  void ExpectHeldUntilWorkIsDone(const std::vector<PhysicalPiece>& pieces) {
    for (const ScopeKind kind : {ScopeKind::kCapture, ScopeKind::kEager}) {
      pool_.BeginScope(kind);
      EXPECT_FALSE(GetsBytesOf(pieces, kPage, kC));
      EXPECT_FALSE(GetsBytesOf(pieces, kGranule, kC));
      EndScope();
    }
    watch_.FinishAll();
    const uint64_t pages = pool_.Stats().pages;
    pool_.BeginScope(ScopeKind::kCapture);
    EXPECT_TRUE(GetsBytesOf(pieces, pages * kPage, kC));
    EndScope();
    EXPECT_EQ(pool_.Stats().pages, pages) << "all is free by now";
  }

  std::vector<CaptureId> captures_;  // under way
  std::map<std::string, Block> blocks_;
  std::map<std::string, std::vector<PhysicalPiece>> pieces_;
  std::map<std::string, PoolCheckpoint> checkpoints_;
  std::map<std::string, Frontier> events_;
};

// A test of a table.
struct PoolScript {
  std::string name;
  std::string script;
  friend void PrintTo(const PoolScript& one, std::ostream* out) { *out << one.name; }
};

class PoolScripts : public PoolProofsTest, public ::testing::WithParamInterface<PoolScript> {
 public:
  static std::string NameOf(const ::testing::TestParamInfo<PoolScript>& one) {
    return one.param.name;
  }
};

}  // namespace cgp
