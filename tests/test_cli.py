"""The command: what it prints, where, and with which exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from entry_points import environment
from small_trace import TRACES, WriteTrace

from cudagraph_pool import _core
from cudagraph_pool.cli.main import main, parser
from cudagraph_pool.tools import replay

SEED = next(path for path in TRACES if path.name.startswith("seed"))
MLP = next(path for path in TRACES if path.name.startswith("mlp"))

Capture = pytest.CaptureFixture[str]


def call(*arguments: str | Path) -> int:
    return main([str(argument) for argument in arguments])


def refused(capsys: Capture, *arguments: str | Path) -> str:
    """The one line that a command ends with that is refused."""
    assert call(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("cudagraph-pool: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    return err


def command(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    started = [sys.executable, "-P", "-m", "cudagraph_pool", *arguments]
    return subprocess.run(started, capture_output=True, text=True, **options)


def test_table(capsys: Capture) -> None:
    assert call("replay", SEED, MLP) == 0
    out, err = capsys.readouterr()
    assert err == ""
    head, _, *rows, about = out.splitlines()
    assert head.split() == "trace graphs order minimum reserved ratio stock seconds".split()
    assert about.endswith("in MiB")
    assert [row.split()[:4] for row in rows] == [
        ["seed_asc", "128", "recorded", "4"],
        ["mlp_asc", "128", "recorded", "146"],
    ]


def test_a_seed_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, run = list[Any](), replay.replay

    def note(trace: Any, *of: Any) -> Any:
        asked.append(of[:2])
        return run(trace)

    monkeypatch.setattr(replay, "replay", note)
    assert call("replay", SEED, "--order", "shuffled") == 0
    assert call("replay", SEED, "--order", "shuffled", "--seed", "5") == 0
    assert asked == [("shuffled", 0), ("shuffled", 5)]


# {trace} is one, {folder} one that is empty, {none} a file in none.
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("replay {trace} {trace} --placements x", "--placements takes one trace, not 2"),
        ("replay {trace} --placements {trace}", "it is the trace itself"),
        ("replay {trace} --placements {folder}", "cannot be written: Is a directory"),
        ("replay {trace} --placements {none}", "cannot be written: No such file"),
        ("replay {trace} --placements /dev/full", "cannot be written: No space left"),
        ("report {trace} --html {trace}", "it is the trace itself"),
        ("report {folder}", "cannot be read: Is a directory"),
        ("plot {trace} -o map.gif", "-o 'map.gif' must end in one of .png, .svg, .pdf"),
        ("footprint models", "'models' is not MODULE:FUNCTION"),
        ("footprint m:f --json .", ".: no file can be written there"),
        ("footprint m:f --json none/a.json", "none/a.json: no file can be written there"),
    ],
)
def test_what_is_refused(
    capsys: Capture, write_trace: WriteTrace, tmp_path: Path, arguments: str, said: str
) -> None:
    trace, folder = write_trace(), tmp_path / "folder"
    folder.mkdir()
    before = trace.read_bytes()
    names = {"trace": trace, "folder": folder, "none": tmp_path / "none" / "file"}
    assert said in refused(capsys, *(word.format(**names) for word in arguments.split(" ")))
    assert (trace.read_bytes(), list(folder.iterdir())) == (before, [])


def test_a_bad_trace_leaves_everything(capsys: Capture, write_trace: WriteTrace) -> None:
    bad = write_trace(graphs=[{"key": 1, "events": [[-1, 3]]}])
    kept = bad.with_name("kept")
    kept.write_text("as it was")
    err = refused(capsys, "replay", bad, "--placements", kept)
    place = "graphs[0].events[0]: block 3 is freed, but never allocated"
    assert err == f"cudagraph-pool: {bad}: {place}\n"
    assert kept.read_text() == "as it was"


@pytest.mark.parametrize(
    "arguments",
    [
        *(["replay"], ["replay", "x", "--order", "up"], ["replay", "x", "--seed", "a"], ["fly"]),
        *(["replay", "--unknown", "x"], ["plot", "a", "b", "-o", "p.png"], ["info", "x"]),
        *(["run"], ["run", "-m"], ["run", "--reports", "x"], ["run", "--share-captures=1", "x"]),
        ["demo", "x"],
    ],
)
def test_wrong_arguments(capsys: Capture, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    known = "" if arguments[0] == "fly" else f" {arguments[0]}"
    assert err.startswith(f"usage: cudagraph-pool{known} ")
    assert "error: " in err


def test_each_command_says_what_it_does_and_how_it_is_called(capsys: Capture) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    for name in ("demo", "footprint", "replay", "run", "record", "report", "plot", "info"):
        (line,) = (line for line in out.splitlines() if line.split()[:1] == [name])
        assert len(line.split()) > 2, "its help stands beside it"
        with pytest.raises(SystemExit):
            parser().parse_args([name, "--help"])
        _, _, example = capsys.readouterr().out.partition("For instance: cudagraph-pool ")
        called = parser().parse_args(example.split("\n\n")[0].split())
        assert example.split()[0] == called.command == name
        assert name in ("demo", "info") or len(example.split()) > 1


def test_failure_and_interrupt_are_one_line(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, code, said in (
        (_core.OutOfMemoryError("a:\n2 pages"), 1, f"{SEED}: the replay failed: a: 2 pages"),
        (KeyboardInterrupt(), 130, "stopped"),
    ):

        def fail(*_: object, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr(replay, "replay", fail)
        assert call("replay", SEED) == code
        assert capsys.readouterr().err == f"cudagraph-pool: {said}\n"


def test_standard_input() -> None:
    with MLP.open() as file:
        done = command("replay", "--json", "/dev/stdin", stdin=file)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["name"] == "mlp_asc"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (f"replay '{SEED}' >/dev/full", 1, "standard output: No space left on device"),
        ("run --help >/dev/full", 1, "standard output: No space left on device"),
        ("info >&-", 0, None),
        ("replay /dev/stdin </dev/null", 2, "/dev/stdin: the file is empty"),
        (f"replay --json '{SEED}' '{MLP}' | true", 0, None),
    ],
)
def test_streams_that_cannot_be_used(
    words: str, code: int, said: str | None, unbuffered: str
) -> None:
    done = subprocess.run(
        f"'{sys.executable}' -P -m cudagraph_pool {words}",
        shell=True,
        capture_output=True,
        text=True,
        env=dict(os.environ, PYTHONUNBUFFERED=unbuffered),
    )
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr == (f"cudagraph-pool: {said}\n" if said else "")


def test_a_name_that_the_terminal_cannot_show(write_trace: WriteTrace) -> None:
    ascii_only = dict(os.environ, PYTHONIOENCODING="ascii")
    done = command("replay", write_trace(name="Übung"), env=ascii_only)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\xdcbung" in done.stdout


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        # scripts/dev.py leaves extension modules in a clone that fit the system's Python too.
        ("sys.modules['tqdm'] = None; sys.exit(main(['info']))", 1, "is not installed for"),
        ("sys.modules['torch'] = None; sys.exit(main(['info']))", 0, ""),
        ("sys.modules['torch'] = None; sys.exit(main(['demo']))", 0, ""),
        ("sys.modules['torch'] = None; sys.exit(main(['replay', sys.argv[1]]))", 0, ""),
        ("sys.modules['torch'] = None; sys.exit(main(['run', 'p.py']))", 2, "run needs torch, and"),
        ("sys.modules['torch'] = None; sys.exit(main(['record', 'p.py']))", 2, "record needs"),
    ],
)
def test_what_is_not_installed(tmp_path: Path, program: str, code: int, said: str) -> None:
    program = f"import sys; from cudagraph_pool.cli.main import main; {program}"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, str(SEED)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(tmp_path),
    )
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert done.stderr.count("\n") == bool(said)


def test_record_ends_as_its_program_that_a_signal_ends(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "program.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    done = command("record", "program.py", cwd=tmp_path, env=environment(tmp_path))
    assert done.returncode == 128 + signal.SIGTERM
