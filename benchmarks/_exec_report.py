"""What shared_execs.py prints: a table for each section."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cudagraph_pool._table import format_table

Row = dict[str, Any]

_MIB = 1 / (1 << 20)


def number(value: float | None, form: str, scale: float = 1) -> str:
    return "-" if value is None else f"{value * scale:{form}}"


def title(config: str) -> str:
    """Of a process: stock, or what bounds our executables."""
    return config if config in ("stock", "default", "budget") else f"K={config}"


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
                number(row["driver_bytes"], ".0f", _MIB),
                number(row["vs_stock"], ".3f"),
            ]
        )
    return format_table(cells, left_columns=(0, 1))


def ready_table(rows: Sequence[Row]) -> str:
    """Milliseconds for all graphs; ``made`` without the updates of those that share."""
    cells = [
        "workload executables graphs ready_ms ÷stock first_ms made_ms of_it_in_exit_ms".split()
    ]
    for row in rows:
        stock = row["config"] == "stock"
        cells.append(
            [
                row["workload"],
                title(row["config"]),
                str(row["graphs"]),
                number(row["ready_seconds"], ".1f", 1e3),
                number(row["vs_stock"], ".3f"),
                number(next(iter(row["ready_seconds_all"]), None), ".1f", 1e3),
                number(row["made_seconds"], ".1f", 1e3),
                "-" if stock else number(row["exit_extra_seconds"], ".1f", 1e3),
            ]
        )
    return format_table(cells, left_columns=(0, 1))


def replay_table(rows: Sequence[Row]) -> str:
    """Of the same graph again: the device's time of one replay, the CPU's of one call."""
    cells = ["workload size executables device_µs ÷stock call_µs ÷stock".split()]
    for row in rows:
        cells.append(
            [
                row["workload"],
                str(row["key"]),
                title(row["config"]),
                number(row["device_seconds"], ".2f", 1e6),
                number(row["device_vs_stock"], ".4f"),
                number(row["cpu_seconds"], ".2f", 1e6),
                number(row["cpu_vs_stock"], ".3f"),
            ]
        )
    return format_table(cells, left_columns=(0, 2))


_SWITCH_HEAD = (
    "chain switch_µs bare ÷bare same_µs bare added_µs bare ÷bare ctypes execs instantiations "
    "updates"
)


def switch_table(rows: Sequence[Row]) -> str:
    """CPU time of one call; ``added`` is that of a switch beyond that of the same again."""
    cells = [_SWITCH_HEAD.split()]
    for row in rows:
        cells.append(
            [
                row["workload"],
                number(row["ours_switch_seconds"], ".1f", 1e6),
                number(row["bare_switch_seconds"], ".1f", 1e6),
                number(row["switch_vs_bare"], ".3f"),
                number(row["ours_same_seconds"], ".1f", 1e6),
                number(row["bare_same_seconds"], ".1f", 1e6),
                number(row["ours_added_seconds"], ".1f", 1e6),
                number(row["bare_added_seconds"], ".1f", 1e6),
                number(row["added_vs_bare"], ".3f"),
                number(row["ctypes_seconds"], ".2f", 1e6),
                str(row["execs"]),
                str(row["instantiations"]),
                str(row["updates"]),
            ]
        )
    return format_table(cells)


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
        number(configs.get("stock", {}).get("steps_per_second"), ".0f"),
        *(number(configs.get(config, {}).get("vs_stock"), ".3f") for config in others),
    ]


def _driver_mib(driver: Mapping[str, Row], config: str) -> str:
    return number(driver[config]["driver_bytes"], ".0f", _MIB) if config in driver else "-"


def results_table(rows: Sequence[Row]) -> str:
    cells = ["workload executables graphs replays outputs".split()]
    for row in rows:
        verdict = f"{row['wrong']} WRONG" if row["wrong"] else "all equal"
        cells.append(
            [
                row["workload"],
                title(row["config"]),
                str(row["graphs"]),
                str(row["replays"]),
                verdict,
            ]
        )
    return format_table(cells, left_columns=(0, 1, 4))


def text(report: Mapping[str, Any]) -> str:
    """All tables, what failed, and how long each section took."""
    rows = report["rows"]
    parts = []
    for section, table in (
        ("memory", memory_table),
        ("ready", ready_table),
        ("replay", replay_table),
        ("switch", switch_table),
        ("results", results_table),
    ):
        if rows.get(section):
            parts.append(f"{section}\n{table(rows[section])}")
    if rows.get("decode"):
        parts.append(f"decode\n{decode_table(rows['decode'], rows.get('memory', []))}")
    for error in report["errors"]:
        parts.append(f"{error['workload']} {title(error['config'])}: FAILED {error['error']}")
    times = (f"{section} {seconds:.0f} s" for section, seconds in report["seconds"].items())
    parts.append(f"took: {', '.join(times)}")
    return "\n\n".join(parts)
