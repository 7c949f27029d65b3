"""What is mapped where."""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "ranges-last-unmap",
        "range_table.cc",
        "the destructor forgets the last mapping",
        "slot < Index(range.end());) {\n      const uint32_t pages",
        "slot + 1 < Index(range.end());) {\n      const uint32_t pages",
    ),
    Mutant(
        "ranges-release",
        "range_table.cc",
        "the destructor keeps the handles",
        "if (slots_of(handle.first).empty()) continue;\n"
        "    attempt([&] { driver_.Release(handle.handle); });",
        "if (slots_of(handle.first).empty()) continue;\n",
    ),
    Mutant(
        "ranges-addresses",
        "range_table.cc",
        "the destructor keeps the addresses",
        "driver_.FreeAddresses(reservation.address, reservation.bytes); });",
        "(void)reservation; });",
    ),
    Mutant(
        "ranges-undo-unmap",
        "range_table.cc",
        "an undo forgets to unmap",
        "Attempt([&] { table_.driver_.Unmap(mapping.address, mapping.bytes); })",
        "Attempt([&] { (void)mapping; })",
    ),
    Mutant(
        "ranges-undo-release",
        "range_table.cc",
        "an undo forgets to release",
        "Attempt([&] { table_.driver_.Release(handle.handle); })",
        "Attempt([&] { (void)handle; })",
    ),
    Mutant(
        "ranges-undo-addresses",
        "range_table.cc",
        "an undo forgets to free the addresses",
        "table_.driver_.FreeAddresses(all.address, all.bytes);",
        "(void)all;",
    ),
    Mutant(
        "ranges-undo-closed",
        "range_table.cc",
        "an undo that failed is forgotten",
        "if (extended != nullptr) (at_front",
        "if (false && extended != nullptr) (at_front",
    ),
    Mutant(
        "ranges-access",
        "range_table.cc",
        "only the first of the pages mapped at once gets access",
        "  driver_.SetAccess(address, count * page_bytes_);\n",
        "  driver_.SetAccess(address, page_bytes_);\n",
    ),
    Mutant(
        "ranges-front-slot",
        "range_table.cc",
        "pages at a range's front are mapped one slot too early",
        "plan.at_front ? range.mapped_begin - count : range.mapped_end;",
        "plan.at_front ? range.mapped_begin - count - 1 : range.mapped_end;",
    ),
    Mutant(
        "ranges-refresh",
        "range_table.cc",
        "a new peer gets no access to the last page of each range",
        "                      range.mapped() * page_bytes_);",
        "                      std::max(range.mapped() - 1, 1U) * page_bytes_);",
    ),
    Mutant(
        "range-first-room",
        "range_table.cc",
        "the first range gets no more room than others (advice)",
        "return ReserveRange(pages, kRoomOfFirst, undo);",
        "return ReserveRange(pages, 0, undo);",
    ),
    Mutant(
        "range-first-short",
        "range_table.cc",
        "no first range where addresses are short",
        "if (error.status() != DriverStatus::kOutOfAddresses) throw;",
        "throw;",
    ),
]
