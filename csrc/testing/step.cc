#include "testing/step.h"

#include <algorithm>
#include <array>
#include <ostream>
#include <sstream>

#include "core/base/error.h"
#include "testing/text.h"

namespace cgp {
namespace {

constexpr std::array<const char*, Step::kKinds> kNames = {
    "Allocate",    "Free",           "Read",        "Write",      "ReadUnsaid",
    "WriteUnsaid", "BeginCapture",   "BeginEager",  "End",        "Retain",
    "Release",     "Trim",           "Use",         "Launch",     "LaunchEarly",
    "Record",      "Wait",           "WaitEarly",   "BeginOwn",   "EndOwn",
    "Invalidate",  "Progress",       "NextGraph",   "Peer",       "Fail",
    "Mend",        "FailAllocation", "FreeInside",  "FreeWild",   "Inspect",
    "Checkpoint",  "Restore",        "Replay",      "BeginApart", "BeginLoan",
    "Sleep",       "Wake",           "TrimToNeeds", "Lease",      "LeaseOut",
    "LeaseBack",   "LeaseEnd",       "NameCapture", "DropCapture"};

bool OfFault(Step::Kind kind) {
  return kind == Step::Kind::kFail || kind == Step::Kind::kFailAllocation;
}

Step StepOf(const std::string& text) {
  std::istringstream words(text);
  std::string name;
  words >> name;
  const auto* const found = std::ranges::find(kNames, name);
  if (found == kNames.end()) throw UsageError("no step: " + text);
  Step step{static_cast<Step::Kind>(found - kNames.begin())};
  std::array<uint64_t, 8> numbers = {
      step.stream, step.item, step.amount,     step.pool, step.fault.call_number,
      2,           0,         kDriverCallKinds};
  size_t count = 0;
  for (uint64_t number = 0; count < numbers.size() && words >> number;) numbers[count++] = number;
  if (!words.eof() || count > (OfFault(step.kind) ? 8 : 4)) throw UsageError("no step: " + text);
  step.stream = numbers[0];
  step.item = numbers[1];
  step.amount = numbers[2];
  step.pool = numbers[3];
  step.fault = {numbers[4], static_cast<DriverStatus>(numbers[5]), numbers[6] != 0};
  if (numbers[7] < kDriverCallKinds) step.fault.only = static_cast<DriverCall>(numbers[7]);
  return step;
}

}  // namespace

std::string ToString(const Step& step) {
  const Fault& fault = step.fault;
  std::string text = Text(kNames[static_cast<size_t>(step.kind)], " ", step.stream, " ", step.item,
                          " ", step.amount, " ", step.pool);
  if (OfFault(step.kind)) {
    text += Text(" ", fault.call_number, " ", static_cast<int>(fault.status), " ", fault.for_good);
    if (fault.only) text += Text(" ", static_cast<int>(*fault.only));
  }
  return text;
}

std::string ToString(const Steps& steps) {
  std::string text;
  for (const Step& step : steps) text += "    " + ToString(step) + ",\n";
  return text;
}

Steps StepsOf(const std::string& text) {
  Steps steps;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) steps.push_back(StepOf(part));
  return steps;
}

std::ostream& operator<<(std::ostream& out, const Step& step) { return out << ToString(step); }

}  // namespace cgp
