"""What shared_execs.py prints: a table for each section."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from _command import number

from cudagraph_pool._table import format_table

Row = dict[str, Any]

_MIB = 1 / (1 << 20)


def title(config: str) -> str:
    """Of a process: stock, or what bounds our executables."""
    return config if config in ("stock", "default") else f"K={config}"


def memory_table(rows: Sequence[Row]) -> str:
    """Driver memory in MiB, at its most."""
    head = "workload executables graphs nodes execs instantiations updates driver_MiB ÷stock"
    cells = [head.split()]
    for row in rows:
        least, most = row["nodes"]
        cells.append(
            [
                row["workload"],
                title(row["config"]),
                str(row["graphs"]),
                str(least) if least == most else f"{least}-{most}",
                str(row["execs"]),
                str(row["instantiations"]),
                str(row["updates"]),
                number(row["driver_bytes"], _MIB, ".0f"),
                number(row["vs_stock"], 1, ".3f"),
            ]
        )
    return format_table(cells, left_columns=(0, 1))


def decode_table(rows: Sequence[Row], memory: Sequence[Row]) -> str:
    """Steps per second: stock's, and of the others divided by it. Below, each one's driver memory,
    where it was measured.
    """
    configs = list(dict.fromkeys(config for row in rows for config in row["configs"]))
    others = [config for config in configs if config != "stock"]
    head = ["workload", "size_changes", "token", "steps", "switches", "sizes", "stock_steps/s"]
    cells = [head + [title(config) for config in others]]
    for workload in dict.fromkeys(row["workload"] for row in rows):
        for row in rows:
            if row["workload"] == workload:
                cells.append(_decode_cells(row, others))
        driver = {row["config"]: row for row in memory if row["workload"] == workload}
        if driver:
            cells.append(
                [workload, "driver MiB", "", "", "", "", _driver_mib(driver, "stock")]
                + [_driver_mib(driver, config) for config in others]
            )
    return format_table(cells, left_columns=(0, 1, 2))


def _decode_cells(row: Row, others: Sequence[str]) -> list[str]:
    configs = row["configs"]
    return [
        row["workload"],
        row["schedule"],
        "read back" if row["read_back"] else "",
        str(row["steps"]),
        str(row["switches"]),
        str(row["sizes"]),
        number(configs.get("stock", {}).get("steps_per_second"), 1, ".0f"),
        *(number(configs.get(config, {}).get("vs_stock"), 1, ".3f") for config in others),
    ]


def _driver_mib(driver: Mapping[str, Row], config: str) -> str:
    return number(driver[config]["driver_bytes"], _MIB, ".0f") if config in driver else "-"


def text(report: Mapping[str, Any]) -> str:
    """All tables, what failed, and how long each section took."""
    rows = report["rows"]
    parts = []
    if rows.get("memory"):
        parts.append(f"memory\n{memory_table(rows['memory'])}")
    if rows.get("decode"):
        parts.append(f"decode\n{decode_table(rows['decode'], rows.get('memory', []))}")
    for error in report["errors"]:
        parts.append(f"{error['workload']} {title(error['config'])}: FAILED {error['error']}")
    times = (f"{section} {seconds:.0f} s" for section, seconds in report["seconds"].items())
    parts.append(f"took: {', '.join(times)}")
    return "\n\n".join(parts)
