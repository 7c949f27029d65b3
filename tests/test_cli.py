"""The command: what it prints, where, and with which exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_trace import TRACES, WriteTrace
from validate_placements import validate

from cudagraph_pool import _core
from cudagraph_pool.cli import commands
from cudagraph_pool.cli.main import main

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
    assert err.count("\n") == 1
    assert err.endswith("\n")
    return err


def test_table(capsys: Capture) -> None:
    assert call("replay", SEED, MLP) == 0
    out, err = capsys.readouterr()
    assert err == ""
    about, head, rule, *rows = out.splitlines()
    assert about.endswith("in MiB")
    assert head.split() == [
        *("trace", "graphs", "order", "minimum", "reserved", "ratio", "stock", "seconds"),
    ]
    assert set(rule) == {"-", " "}
    assert len({len(line) for line in (head, rule, *rows)}) == 1
    assert [row.split()[:4] for row in rows] == [
        ["seed_asc", "128", "recorded", "4"],
        ["mlp_asc", "128", "recorded", "146"],
    ]


def test_json_is_one_object_a_trace(capsys: Capture) -> None:
    assert call("replay", "--json", SEED, MLP, "--order", "desc") == 0
    out, err = capsys.readouterr()
    assert err == ""
    objects = [json.loads(line) for line in out.splitlines()]
    assert [result["name"] for result in objects] == ["seed_asc", "mlp_asc"]
    assert [result["order"] for result in objects] == ["desc", "desc"]


def test_seeds_shuffle_differently_and_repeat(capsys: Capture) -> None:
    def shuffled(*seed: str) -> dict[str, object]:
        assert call("replay", "--json", MLP, "--order", "shuffled", *seed) == 0
        result: dict[str, object] = json.loads(capsys.readouterr().out)
        del result["seconds"]
        return result

    assert shuffled("--seed", "5") == shuffled("--seed", "5")
    assert shuffled() == shuffled("--seed", "0")
    assert len({json.dumps(shuffled("--seed", str(seed))) for seed in range(4)}) > 1


def test_placements_file(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "placements.jsonl"
    assert call("replay", "--json", MLP, "--order", "desc", "--placements", path) == 0
    result = json.loads(capsys.readouterr().out)
    with path.open() as file:
        assert validate(file).reserved_bytes == result["reserved_bytes"]


@pytest.mark.parametrize("options", [[], ["--json"], ["--order", "desc"]])
def test_bad_trace_is_one_line_and_leaves_everything(
    capsys: Capture, tmp_path: Path, options: list[str]
) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text(
        '{"name": "x", "stock": {"reserved": 1}, "graphs": [{"key": 1, "events": [[-1, 3]]}]}'
    )
    err = refused(capsys, "replay", SEED, bad, MLP, *options)
    assert err == (
        f"cudagraph-pool: {bad}: graphs[0].events[0]: block 3 is freed, but was never allocated\n"
    )
    kept = tmp_path / "kept"
    kept.write_text("as it was")
    refused(capsys, "replay", bad, *options, "--placements", kept)
    assert kept.read_text() == "as it was"


def test_placements_of_several_traces_are_refused(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "placements"
    err = refused(capsys, "replay", SEED, MLP, "--placements", path)
    assert "--placements takes one trace, not 2" in err
    assert not path.exists()


def test_placements_never_overwrite_the_trace(capsys: Capture, write_trace: WriteTrace) -> None:
    path = write_trace()
    before = path.read_bytes()
    assert "the trace itself" in refused(capsys, "replay", path, "--placements", path)
    assert path.read_bytes() == before


def test_placements_that_cannot_be_written(capsys: Capture, tmp_path: Path) -> None:
    assert "cannot be written" in refused(capsys, "replay", SEED, "--placements", tmp_path)
    missing = tmp_path / "none" / "file"
    assert "No such file" in refused(capsys, "replay", SEED, "--placements", missing)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_placements_on_a_full_disk(capsys: Capture) -> None:
    assert "No space left" in refused(capsys, "replay", MLP, "--placements", "/dev/full")


def test_seed_without_shuffling_is_refused(capsys: Capture) -> None:
    assert "--seed is for --order shuffled" in refused(capsys, "replay", SEED, "--seed", "1")


@pytest.mark.parametrize(
    "arguments",
    [[], ["replay"], ["replay", "x", "--order", "up"], ["replay", "x", "--seed", "a"], ["fly"]],
)
def test_wrong_arguments(capsys: Capture, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "error: " in err


@pytest.mark.parametrize(
    "arguments", [["replay", "--unknown", "x"], ["plot", "a", "b", "-o", "p.png"], ["info", "x"]]
)
def test_usage_is_the_commands_own(capsys: Capture, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(f"usage: cudagraph-pool {arguments[0]} ")
    assert f"cudagraph-pool {arguments[0]}: error: unrecognized arguments: " in err


@pytest.mark.parametrize(("command", "option"), [("replay", "--placements"), ("report", "--html")])
@pytest.mark.parametrize(("name", "said"), [("", "is empty"), ("-", "/dev/stdout")])
def test_names_that_are_no_file(
    capsys: Capture, command: str, option: str, name: str, said: str
) -> None:
    err = refused(capsys, command, SEED, option, name)
    assert option in err
    assert said in err


def test_failure_in_the_core_is_one_line(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise _core.OutOfMemoryError("out of memory:\n2 of 1 pages")

    monkeypatch.setattr(commands, "replay", fail)
    assert call("replay", SEED) == 1
    err = capsys.readouterr().err
    assert err == f"cudagraph-pool: {SEED}: the replay failed: out of memory: 2 of 1 pages\n"


def test_version(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.strip() == _core.__version__


def test_help_names_every_command(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    for command in ("demo", "footprint", "replay", "run", "record", "report", "plot", "info"):
        assert command in out


def test_demo_gets_its_own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    from cudagraph_pool.tools import demo

    monkeypatch.setattr(demo, "main", lambda argv: 7 if argv == ["--any", "x"] else 0)
    assert call("demo", "--any", "x") == 7


def test_module_runs_as_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "cudagraph_pool", "replay", "--json", str(SEED)],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["name"] == "seed_asc"


def test_what_stock_took_is_of_the_recorded_order(capsys: Capture) -> None:
    for order, stock in (("recorded", "1,326"), ("desc", "-")):
        assert call("replay", MLP, "--order", order) == 0
        assert capsys.readouterr().out.splitlines()[-1].split()[6] == stock


def test_standard_input(capsys: Capture) -> None:
    with MLP.open() as file:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "cudagraph_pool", "replay", "--json", "-"],
            stdin=file,
            capture_output=True,
            text=True,
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["name"] == "mlp_asc"
    assert "once" in refused(capsys, "replay", "-", "-")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        (f"replay '{SEED}' >/dev/full", 1, "[Errno 28] No space left on device"),
        ("--version >/dev/full", 1, "[Errno 28] No space left on device"),
        ("run --help >/dev/full", 1, "[Errno 28] No space left on device"),
        ("info >&-", 1, "[Errno 9] Bad file descriptor"),
        ("replay - <&-", 2, "-: file: cannot be read: Bad file descriptor"),
        ("replay none 2>&-", 2, None),
    ],
)
def test_streams_that_cannot_be_used(
    command: str, code: int, said: str | None, unbuffered: str
) -> None:
    done = subprocess.run(
        f"'{sys.executable}' -P -m cudagraph_pool {command}",
        shell=True,
        capture_output=True,
        text=True,
        env=dict(os.environ, PYTHONUNBUFFERED=unbuffered),
    )
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr == (f"cudagraph-pool: {said}\n" if said else "")


def test_interrupt_is_one_line(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "replay", interrupted)
    assert call("replay", SEED) == 130
    assert capsys.readouterr().err == "cudagraph-pool: stopped\n"


def test_a_name_that_the_terminal_cannot_show(write_trace: WriteTrace) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "cudagraph_pool", "replay", write_trace(name="Übung")],
        env=dict(os.environ, PYTHONIOENCODING="ascii"),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\xdcbung" in done.stdout


def test_reader_that_goes_away_is_no_traceback() -> None:
    command = f"'{sys.executable}' -P -m cudagraph_pool replay --json '{SEED}' '{MLP}' | true"
    environ = dict(os.environ, PYTHONUNBUFFERED="1")
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=environ)
    assert done.stderr == ""


def test_clone_that_was_installed_for_another_python() -> None:
    """scripts/dev.py leaves extension modules in a clone that fit the system's Python too."""
    program = (
        "import sys; sys.modules['tqdm'] = None; from cudagraph_pool.cli.main import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, "info"], capture_output=True, text=True
    )
    assert "is not installed for" in done.stderr
    assert done.stderr.count("\n") == 1


def test_command_never_imports_torch() -> None:
    program = (
        "import sys\n"
        "sys.modules['torch'] = None\n"  # an import of it would raise
        "from cudagraph_pool.cli.main import main\n"
        "sys.exit(main(['info']) or main(['replay', sys.argv[1]]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, str(SEED)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
