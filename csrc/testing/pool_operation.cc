#include "testing/pool_operation.h"

#include <limits>
#include <ostream>
#include <sstream>

namespace cgp {
namespace {

void Put(std::ostream& out, uint64_t number) {
  out << number << (number > std::numeric_limits<int64_t>::max() ? "U" : "");
}
void Put(std::ostream& out, int number) { out << number; }
void Put(std::ostream& out, bool truth) { out << (truth ? "true" : "false"); }
void Put(std::ostream& out, DriverCall call) { out << "DriverCall::k" << Name(call); }
void Put(std::ostream& out, ScopeKind kind) {
  out << "ScopeKind::" << (kind == ScopeKind::kCapture ? "kCapture" : "kEager");
}
void Put(std::ostream& out, DriverStatus status) {
  constexpr const char* kNames[] = {"kOutOfMemory", "kOutOfAddresses", "kFailed"};
  out << "DriverStatus::" << kNames[static_cast<size_t>(status)];
}

struct Printer {
  std::ostream& out;

  template <typename... Fields>
  void Print(const char* name, Fields... fields) const {
    [[maybe_unused]] const char* between = "{";
    out << name;
    ((out << between, Put(out, fields), between = ", "), ...);
    out << (sizeof...(fields) == 0 ? "{}" : "}");
  }

  void operator()(const RetainOp& op) const { Print("RetainOp", op.pool); }
  void operator()(const BeginOp& op) const { Print("BeginOp", op.pool, op.kind); }
  void operator()(const EndOp& op) const { Print("EndOp", op.pool); }
  void operator()(const ReplayOp& op) const { Print("ReplayOp", op.pool, op.stream); }
  void operator()(const ReleaseOp& op) const { Print("ReleaseOp", op.pool); }
  void operator()(const AllocateOp& op) const {
    Print("AllocateOp", op.label, op.pool, op.bytes, op.stream);
  }
  void operator()(const FreeOp& op) const { Print("FreeOp", op.label); }
  void operator()(const FreeInsideOp& op) const { Print("FreeInsideOp", op.label); }
  void operator()(const FreeWildOp& op) const { Print("FreeWildOp", op.address); }
  void operator()(const RecordUseOp& op) const { Print("RecordUseOp", op.label, op.stream); }
  void operator()(const CheckpointOp& op) const { Print("CheckpointOp", op.number, op.pool); }
  void operator()(const RestoreOp& op) const { Print("RestoreOp", op.number, op.pool); }
  void operator()(const TrimOp&) const { Print("TrimOp"); }
  void operator()(const ProgressOp& op) const { Print("ProgressOp", op.stream, op.count); }
  void operator()(const EnablePeerOp& op) const { Print("EnablePeerOp", op.peer); }
  void operator()(const FailOp& op) const {
    if (op.only) return Print("FailOp", op.after, op.status, op.for_good, *op.only);
    Print("FailOp", op.after, op.status, op.for_good);
  }
  void operator()(const MendOp&) const { Print("MendOp"); }
  void operator()(const FailAllocationOp& op) const {
    Print("FailAllocationOp", op.after, op.for_good);
  }
  void operator()(const InspectOp&) const { Print("InspectOp"); }
};

}  // namespace

std::ostream& operator<<(std::ostream& out, const PoolOperation& operation) {
  std::visit(Printer{out}, operation);
  return out;
}

std::string ToString(const PoolOperation& operation) {
  std::ostringstream text;
  text << operation;
  return text.str();
}

std::string ToString(const std::vector<PoolOperation>& operations) {
  std::string text;
  for (const PoolOperation& operation : operations) text += "    " + ToString(operation) + ",\n";
  return text;
}

}  // namespace cgp
