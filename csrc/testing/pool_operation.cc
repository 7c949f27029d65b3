#include "testing/pool_operation.h"

#include <ostream>
#include <sstream>

namespace cgp {
namespace {

const char* NameOf(ScopeKind kind) {
  return kind == ScopeKind::kCapture ? "ScopeKind::kCapture" : "ScopeKind::kEager";
}

const char* NameOf(DriverStatus status) {
  switch (status) {
    case DriverStatus::kOutOfMemory:
      return "DriverStatus::kOutOfMemory";
    case DriverStatus::kOutOfAddresses:
      return "DriverStatus::kOutOfAddresses";
    case DriverStatus::kFailed:
      return "DriverStatus::kFailed";
  }
  return "?";
}

struct Printer {
  std::ostream& out;

  void operator()(const RetainOp& op) const { out << "RetainOp{" << op.pool << "}"; }
  void operator()(const BeginOp& op) const {
    out << "BeginOp{" << op.pool << ", " << NameOf(op.kind) << "}";
  }
  void operator()(const EndOp& op) const { out << "EndOp{" << op.pool << "}"; }
  void operator()(const ReplayOp& op) const {
    out << "ReplayOp{" << op.pool << ", " << op.stream << "}";
  }
  void operator()(const ReleaseOp& op) const { out << "ReleaseOp{" << op.pool << "}"; }
  void operator()(const AllocateOp& op) const {
    out << "AllocateOp{" << op.label << ", " << op.pool << ", " << op.bytes << "U, " << op.stream
        << "}";
  }
  void operator()(const FreeOp& op) const { out << "FreeOp{" << op.label << "}"; }
  void operator()(const FreeInsideOp& op) const { out << "FreeInsideOp{" << op.label << "}"; }
  void operator()(const FreeWildOp& op) const { out << "FreeWildOp{" << op.address << "U}"; }
  void operator()(const RecordUseOp& op) const {
    out << "RecordUseOp{" << op.label << ", " << op.stream << "}";
  }
  void operator()(const CheckpointOp& op) const {
    out << "CheckpointOp{" << op.number << ", " << op.pool << "}";
  }
  void operator()(const RestoreOp& op) const {
    out << "RestoreOp{" << op.number << ", " << op.pool << "}";
  }
  void operator()(const TrimOp&) const { out << "TrimOp{}"; }
  void operator()(const ProgressOp& op) const {
    out << "ProgressOp{" << op.stream << ", " << op.count << "}";
  }
  void operator()(const EnablePeerOp& op) const { out << "EnablePeerOp{" << op.peer << "}"; }
  void operator()(const FailOp& op) const {
    out << "FailOp{" << op.after << ", " << NameOf(op.status) << ", "
        << (op.for_good ? "true" : "false");
    if (op.only) out << ", DriverCall::k" << Name(*op.only);
    out << "}";
  }
  void operator()(const MendOp&) const { out << "MendOp{}"; }
  void operator()(const FailAllocationOp& op) const {
    out << "FailAllocationOp{" << op.after << ", " << (op.for_good ? "true" : "false") << "}";
  }
  void operator()(const InspectOp&) const { out << "InspectOp{}"; }
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
