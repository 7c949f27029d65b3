// What captures of several streams may take of each other, of earlier ones and of what was not
// captured. What one capture proves for itself cgp_fuzz --captures judges.
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
namespace {

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
  void Join(StreamId stream, StreamId other) { graphs_.Wait(stream, graphs_.Record(other)); }

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
  //   A launches     something; "B waits A" for what A has captured by now
  //   A works        what is not captured; "done" when it is over
  //   A reuses 2p    gets memory that the pool has already, and keeps it; else "A grows 2p"
  //   invalidate     the last capture
  //   pages 3        that the pool has by now
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
    } else if (first == "pages") {
      EXPECT_EQ(pool_.Stats().pages, std::stoul(verb));
    } else if (first == "free") {
      for (std::size_t i = 1; i < words.size(); ++i) Free(blocks_.at(words[i]));
    } else if (sign != words.end()) {
      const auto names = static_cast<std::size_t>(sign - words.begin());
      for (std::size_t i = 0; i < names; ++i) {
        blocks_[words[i]] = Allocate(SizeOf(words, names + 2), StreamOf(words.at(names + 1)));
      }
    } else if (verb == "uses") {
      Use(blocks_.at(words.at(2)), StreamOf(first));
    } else if (verb == "launches") {
      Launch(StreamOf(first));
    } else if (verb == "waits") {
      Join(StreamOf(first), StreamOf(words.at(2)));
    } else if (verb == "works") {
      watch_.Submit(StreamOf(first));
    } else if (verb == "reuses" || verb == "grows") {
      EXPECT_EQ(Reuses(SizeOf(words, 2), StreamOf(first)), verb == "reuses");
    } else {
      ADD_FAILURE() << "no such statement";
    }
  }

  std::vector<CaptureId> captures_;  // under way
  std::map<std::string, Block> blocks_;
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

TEST_P(PoolScripts, GivesWhatIsProvenAndNothingElse) { Play(GetParam().script); }

std::vector<PoolScript> Scripts() {
  return {
      // --- Streams that are not capturing ---
      {"AUseOnAStreamThatIsNotCapturingLastsUntilItsEventAfterTheScope",
       "capture A B; a = A; C uses a; C works; A launches; free a; B waits A; A grows; B grows; "
       "end;"
       "capture A B; A grows (C has not done its work); done; A reuses; end"},
      {"AUseBeforeItsStreamJoinsLastsUntilItsEventAfterTheScope",
       "capture A; a = A; B uses a; B works; B waits A; B launches; free a; A waits B;"
       "A grows (a replay does not wait for what B did before it joined); B grows; end;"
       "capture A B; A grows (nor does the end of the capture); done; A reuses"},
      {"SoDoesOneBetweenTwoCapturesOfItsStream",
       "scope begins; body B C; b = B; c = C; body ends;"
       "body A; a = A; B uses a; B works; B waits A; B launches; free a; end;"
       "capture A; A grows (B is still at work)"},
      {"AUseBeforeTheCaptureLastsUntilItsEventThoughItsStreamCapturesNow",
       "capture A; output = A; end; B uses output; B works;"
       "capture A B; B launches; free output; A waits B;"
       "A grows (a replay does not wait for what B did before the capture); B grows; end;"
       "capture A B; A grows (nor does the end of the capture); B grows; done; A reuses; end"},
      // What it does may be part of a body by the time that it allocates again.
      {"WhatAStreamFreesThatIsNotCapturingIsHeldWhileOthersAre",
       "capture A B; a = A; c = C; free c; A launches; B waits A; B grows; C grows"},
      {"TheFirstStreamNeedNotBeCapturing",
       "capture A B; c = C; A launches; free c; A grows; B grows; C reuses; d = C; free d; A grows;"
       "C grows; end"},
      {"EagerWorkBetweenCapturesIsWaitedFor",
       "capture A B; B launches; A launches; x = A 8g; y = B 8g; a = A; free a; end;"
       "eager; e = B; pages 2; B works; free e; scope ends;"
       "capture A B; B launches; A launches;"
       "b = B; pages 3 (the graph may be replayed on any stream); free b;"
       "A waits B; A reuses (behind B's free); done; A reuses (B has done its work); end"},
      {"WhatIsFreedWhileACaptureElsewhereUsesItIsNotOpenToAScopeWithinThat",
       "capture A; a = A; end; body A B; A launches; free a; scope begins; B grows; scope ends;"
       "body ends; capture B; B reuses; end"},
      // --- Several captures in one scope, as of a conditional node's bodies ---
      {"NoCaptureTakesWhatAnotherOneFreedBeforeTheScopeEnds",
       "capture A B; outer = A; b = B; A launches; free outer;"
       "body C; C grows; C launches; inner = C; free inner; C reuses (its own); last = C; free "
       "last;"
       "body ends; A launches; B waits A; B reuses (that of A); B grows;"
       "body C; C grows (the same stream, but another body); body ends; end; capture B; B reuses"},
      // A's frontier in its new capture says nothing of what it did in the one before.
      {"AStreamThatHasGoneOnToAnotherCaptureProvesNothingOfTheOneBefore",
       "capture A B; a used = A; B uses used; A launches; capture ends;"
       "body A B; x = A; A launches; free a used; A grows; B waits A; B grows;"
       "own = A; A launches; free own; A reuses (what it has worked on in this one alone); end"},
      {"NorOfABlockOfAnEarlierScope",
       "capture A; old = A; end;"
       "scope begins; body B; B launches; body A; A launches; x = A 8g; y = B 8g; fresh = A;"
       "free old fresh; body ends; body A; A launches; A grows; body ends; body ends; scope ends"},
      // Nothing is allocated, so that the pool learns of the captures from the free alone.
      {"AUserInAnotherCaptureIsWaitedForThoughTheScopeOnlyFrees",
       "capture A; a = A; end;"
       "scope begins; body B; body A; A launches; B launches; B uses a; free a; end;"
       "capture A; A grows (B still captures); end; body ends; capture A; A reuses"},
      // --- Captures that fail ---
      {"OfAnInvalidatedCaptureAllComesBackAfterItsEnd",
       "capture A B; a = A; b = B; used = A; B uses used; A launches; B launches; free a; "
       "invalidate;"
       "B grows; free b used; A grows; B grows; end; done;"
       "capture C; C reuses; C reuses; C reuses; C grows; end"},
      // cudaStreamEndCapture() fails; what the streams captured is gone.
      {"AStreamThatNeverJoinedHoldsNothing",
       "capture A B; B launches; A launches; a = A 8g; b = B 8g; c = B 3p; free c; A grows; end;"
       "capture C; C reuses 3p; end"},
      // As PyTorch does: the capture has ended when the scope does, and blocks die in between.
      {"WhatIsFreedBetweenTheEndsOfTheCaptureAndTheScopeIsFreeAfterwards",
       "capture A B; a = A; b = B; used = A; B uses used; A launches; B launches; capture ends;"
       "free a b used; scope ends; capture C; C reuses; C reuses; C reuses"},
  };
}

INSTANTIATE_TEST_SUITE_P(Captures, PoolScripts, ::testing::ValuesIn(Scripts()),
                         PoolScripts::NameOf);

// --- The only stream of a scope, which leaves its capture ---

// What it does next that makes the pool look.
enum class Next : uint8_t { kAllocates, kIsJoinedByAnother, kRecordsAUse };

class OnlyStreamTest : public PoolProofsTest, public ::testing::WithParamInterface<Next> {};

TEST_P(OnlyStreamTest, LeavesItsBytesBehindWhereItsCaptureIsOver) {
  pool_.BeginScope(ScopeKind::kCapture);
  const CaptureId own = BeginCapture({kB});
  const Block kept = Allocate(kPage, kB);
  const Block late = Allocate(kPage, kB);
  Free(Allocate(kPage, kB));
  Launch(kB);
  graphs_.End(own);
  Free(late);
  const CaptureId capture = BeginCapture({kA});
  Join(kB, kA);
  if (GetParam() == Next::kIsJoinedByAnother) {
    EXPECT_FALSE(Reuses(kPage, kA));
  }
  if (GetParam() == Next::kRecordsAUse) Use(kept, kA);
  EXPECT_FALSE(Reuses(2 * kPage, kB)) << "the graph of its own capture still uses them";
  Free(kept);
  Launch(kB);
  EXPECT_FALSE(Reuses(kPage, kB));
  EXPECT_FALSE(Reuses(kPage, kA));
  const Block here = Allocate(kPage, kB);
  Free(here);
  EXPECT_TRUE(Reuses(kPage, kB)) << "what it leaves in the capture that it is in is its own";
  End(capture);
  const CaptureId next = Begin({kB});
  EXPECT_TRUE(Reuses(3 * kPage, kB));
  End(next);
}

INSTANTIATE_TEST_SUITE_P(, OnlyStreamTest,
                         ::testing::Values(Next::kAllocates, Next::kIsJoinedByAnother,
                                           Next::kRecordsAUse));

}  // namespace
}  // namespace cgp
