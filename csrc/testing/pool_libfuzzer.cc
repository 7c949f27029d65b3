// cgp_libfuzzer: programs that libFuzzer makes up, judged by the model as those of cgp_fuzz are.
//
//   cgp_libfuzzer -max_total_time=60 build/corpus csrc/testing/corpus
//
// Any bytes are a program. The first says what the session is like; then three say each step: its
// kind, who does it, and how much. A program that fails prints as scripts_test.cc reads it.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>

#include "testing/fuzz_session.h"
#include "testing/step.h"

namespace cgp {
namespace {

using enum Step::Kind;

constexpr uint64_t kCapturedStreams = 4;

// Common ones stand twice.
constexpr std::array kOfPools = {kAllocate,   kAllocate, kFree,       kFree,     kBeginCapture,
                                 kBeginEager, kEnd,      kRetain,     kRelease,  kTrim,
                                 kUse,        kProgress, kPeer,       kFail,     kMend,
                                 kInspect,    kReplay,   kFreeInside, kFreeWild, kFailAllocation,
                                 kCheckpoint, kRestore,  kAllocate,   kProgress};
// Of the last kind bytes.
constexpr std::array kOfLeases = {kBeginApart, kBeginLoan,   kBeginLoan,   kSleep,
                                  kSleep,      kWake,        kTrimToNeeds, kTrimToNeeds,
                                  kLease,      kLeaseOut,    kLeaseBack,   kLeaseEnd,
                                  kReplay,     kNameCapture, kDropCapture, kBeginLoan};
constexpr std::array kOfCaptures = {
    kAllocate,    kAllocate,    kFree,     kFree,   kRead,       kWrite,    kWrite,
    kReadUnsaid,  kWriteUnsaid, kUse,      kLaunch, kRecord,     kWait,     kWait,
    kLaunchEarly, kWaitEarly,   kBeginOwn, kEndOwn, kInvalidate, kProgress, kNextGraph};

FuzzSetup SetupOf(uint8_t byte) {
  FuzzSetup setup;
  if (byte % 2 == 0) setup.streams = kCapturedStreams;
  setup.map_memory = setup.streams > 0 || byte / 2 % 2 == 0;
  setup.page_bytes = uint64_t{4096} << byte / 4 % 4;
  setup.forked = byte / 16 % 2 == 0;
  setup.tidy_end = byte / 32 % 2 == 0;
  setup.one_pool = setup.streams > 0 || byte / 64 % 2 == 0;
  if (byte / 128 != 0) setup.physical_limit_bytes = 12 * setup.page_bytes;
  return setup;
}

class Reader {
 public:
  explicit Reader(const FuzzSession& session) : session_(session) {}

  Step Read(std::span<const uint8_t, 3> bytes) {
    const auto [kind, who, amount] = std::array{bytes[0], bytes[1], bytes[2]};
    const FuzzSetup& setup = session_.setup();
    const bool captures = setup.streams > 0;
    constexpr size_t kFirstOfLeases = 256 - kOfLeases.size();
    Step step{captures                 ? kOfCaptures[kind % kOfCaptures.size()]
              : kind >= kFirstOfLeases ? kOfLeases[kind - kFirstOfLeases]
                                       : kOfPools[kind % kOfPools.size()]};
    step.stream = who % (captures ? kCapturedStreams : 8);
    if (!setup.one_pool) step.pool = 1 + who / 8 % 3;
    step.amount = amount;
    const uint64_t loan = PoolModel::LoanOf({step.pool}).first;
    const bool of_loan = step.kind == kAllocate || step.kind == kEnd;
    if (of_loan && who >= 128 && session_.OpenScope(loan)) step.pool = loan;
    if (step.kind == kAllocate) {
      step.item = ++last_block_;
      step.amount = amount < 128 ? amount * 100U : (amount - 127) * (setup.page_bytes / 4) - who;
    } else if (step.kind == kRecord) {
      step.item = ++last_event_;
    } else if (step.kind == kWait || step.kind == kWaitEarly) {
      step.item = last_event_ - std::min<uint64_t>(last_event_, amount % 4);
    } else if (step.kind == kSleep || (step.kind >= kLease && step.kind <= kDropCapture)) {
      step.item = step.kind == kDropCapture ? amount : who / 32;
      step.amount = amount % 4;
    } else if (step.kind == kCheckpoint || step.kind == kRestore) {
      step.item = amount % 3;
    } else if (step.kind == kBeginCapture || step.kind == kBeginEager) {
      step.amount = amount == 0;
    } else if (step.kind == kFail || step.kind == kFailAllocation) {
      step.fault = {.call_number = 1U + amount % 16,
                    .status = static_cast<DriverStatus>(who % 3),
                    .for_good = amount >= 128};
      if (who >= 64) step.fault.only = static_cast<DriverCall>(who % kDriverCallKinds);
    } else if (step.kind == kPeer) {
      step.item = 1 + amount % 4;
    } else if (const auto& live = session_.live_labels(); !live.empty()) {
      step.item = live[amount % live.size()];
    }
    return step;
  }

 private:
  const FuzzSession& session_;
  uint64_t last_block_ = 0;
  uint64_t last_event_ = 0;
};

void RunProgram(std::span<const uint8_t> bytes) {
  FuzzSession session(SetupOf(bytes[0]));
  Reader reader(session);
  Steps steps;
  std::string complaint;
  const auto run = [&](const Step& step) {
    steps.push_back(step);
    complaint = session.Run(step);
  };
  if (session.setup().streams > 0) run({kBeginCapture});
  for (size_t at = 1; at + 3 <= bytes.size() && complaint.empty(); at += 3) {
    run(reader.Read(bytes.subspan(at).first<3>()));
  }
  if (complaint.empty()) complaint = session.Finish();
  if (complaint.empty()) return;
  std::fprintf(stderr, "fuzz: FAILED: %s\n  %s\n%s", complaint.c_str(),
               ToString(session.setup()).c_str(), ToString(steps).c_str());
  std::abort();
}

}  // namespace
}  // namespace cgp

// The name that libFuzzer calls. NOLINTNEXTLINE(readability-identifier-naming)
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size > 0) cgp::RunProgram({data, size});
  return 0;
}
