"""Enabled without an edit: what the variable says, who acts on it and when, and what that costs."""

from __future__ import annotations

import importlib.util
import inspect
import json
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from entry_points import environment

from cudagraph_pool import switch
from cudagraph_pool.cli.main import main
from cudagraph_pool.integration import autoload, sglang, vllm
from cudagraph_pool.integration import request as _request

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="needs torch, of any kind"
)

# First use of CUDA where there is none: torch's own initialisation around a driver that agrees.
FIRST_USE = """
import logging, os, sys, torch
from cudagraph_pool import switch
from cudagraph_pool.integration import request as _request

def enable(share_captures=False):
    print("enabled", share_captures, torch.cuda.is_initialized(), flush=True)

class Adapter:
    def capture_counts(self):
        return {"ours": 2, "base": 1}

def first_use():
    torch._C._cuda_init = torch._C._cuda_getDeviceCount = lambda: 0
    torch.cuda._cudart = torch.cuda._cudart or object()
    torch.cuda.init()
    torch.cuda.init()

switch.enable = enable
_request.load_adapter = Adapter
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Python with these arguments where the package is installed and there is no GPU."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            env=environment(tmp_path, CUDA_VISIBLE_DEVICES="", **variables),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run


Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_names_come_when_they_are_asked_for(run: Run) -> None:
    program = (
        "import sys, cudagraph_pool as cgp\n"
        "ours = lambda: {name for name in sys.modules if name.startswith('cudagraph_pool')}\n"
        "assert ours() == {'cudagraph_pool'}, ours()\n"
        "assert {'enable', 'GraphPool', '__version__'} <= set(dir(cgp))\n"
        "assert cgp.sizes.vllm(8)[-1] == 8\n"
        "assert ours() == {'cudagraph_pool', 'cudagraph_pool.sizes'}, ours()\n"
        "assert not cgp.is_enabled() and not hasattr(cgp, 'nothing')\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    done = run("-c", program)
    assert done.returncode == 0, done.stderr


@needs_torch
def test_import_of_torch_imports_next_to_nothing(run: Run) -> None:
    program = (
        "import sys, torch\n"
        "ours = {name for name in sys.modules if name.startswith('cudagraph_pool')}\n"
        "assert {name.removeprefix('cudagraph_pool') for name in ours} == "
        "{'', '.integration', '.integration.autoload', '.integration.environment'}, ours\n"
        "assert not any('cudagraph_pool' in call.__module__ for call, _ in "
        "torch.cuda._queued_calls)\n"
    )
    done = run("-c", program)
    assert (done.returncode, done.stderr) == (0, "")


def test_unset_variable_costs_no_time(run: Run, tmp_path: Path) -> None:
    """What torch does with the entry point, in a process that has found it. The issue's limit, of
    CPU time, since others may have the CPU meanwhile, and with the bytecode that pip installs: the
    environment of the tests may keep Python from writing it.
    """
    cached = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path / "bytecode")}
    program = (
        "import time, typing\n"  # torch has imported typing
        "from importlib.metadata import entry_points\n"
        "(point,) = entry_points(group='torch.backends', name='cudagraph_pool')\n"
        "began = time.process_time()\n"
        "point.load()()\n"
        "print(time.process_time() - began)\n"
    )
    seconds = min(float(run("-c", program, **cached).stdout) for _ in range(5))
    assert seconds <= 0.002


@needs_torch
def test_torch_enables_at_the_first_use(run: Run) -> None:
    program = FIRST_USE + "assert not torch.cuda.is_initialized()\nprint('imported')\nfirst_use()\n"
    done = run("-c", program, CUDAGRAPH_POOL="share_captures=1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["imported", "enabled True False"]


@needs_torch
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_that_it_starts(run: Run, tmp_path: Path, method: str) -> None:
    """A parent that has not used CUDA may fork; both ways end in a report."""
    program = FIRST_USE + (
        "import multiprocessing\n"
        "if __name__ == '__main__':\n"
        f"    child = multiprocessing.get_context('{method}').Process(target=first_use)\n"
        "    child.start()\n"
        "    child.join()\n"
        "    print(child.pid)\n"
    )
    path = tmp_path / "program.py"
    path.write_text(program)
    done = run(str(path), CUDAGRAPH_POOL="report=1")
    enabled, pid = done.stdout.splitlines()
    assert enabled == "enabled False False"
    assert done.stderr == (
        f"cudagraph_pool, process {pid}: 3 CUDA graph captures, 2 of them in pools of "
        "cudagraph_pool\n"
    )


@needs_torch
@pytest.mark.parametrize(
    ("request_text", "reason"),
    [("1", "cudagraph_pool"), ("share_captures", "'share_captures' is not understood: ")],
)
def test_what_cannot_be_done_is_said_once_and_breaks_nothing(
    run: Run, request_text: str, reason: str
) -> None:
    """With nothing faked but the driver: torch's CUDA, the adapter or the GPU is missing."""
    done = run("-c", "import torch", CUDAGRAPH_POOL=request_text)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    program = FIRST_USE.replace("switch.enable =", "_ =").replace("_request.load_adapter =", "_ =")
    done = run("-c", program + "first_use()\nprint('goes on')", CUDAGRAPH_POOL=request_text)
    assert (done.returncode, done.stdout) == (0, "goes on\n")
    said = f"CUDAGRAPH_POOL={request_text}: CUDA graphs stay in PyTorch's own pools, since "
    assert done.stderr.startswith(said)
    assert reason in done.stderr
    assert done.stderr.count("\n") == 1


def test_options_of_enable_are_switches() -> None:
    parameters = inspect.signature(switch.enable).parameters
    # `parse`, `unparse` and the flags of `run` know switches only.
    assert all(isinstance(parameter.default, bool) for parameter in parameters.values())


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("1", {}),
        ("True", {}),
        ("on", {}),
        ("share_captures=yes,mempools=OFF", {"share_captures": True, "mempools": False}),
        ("share_captures=1", {"share_captures": True}),
        ("share_captures=0, report=1", {"share_captures": False, "report": True}),
    ],
)
def test_parse(text: str, chosen: dict[str, bool]) -> None:
    assert _request.parse(text) == chosen
    assert _request.parse(_request.unparse(chosen)) == chosen


@pytest.mark.parametrize(
    "text", ["2", "maybe", "1,report=1", "report", "report=", "report=2", "a=1"]
)
def test_parse_says_what_is_known(text: str) -> None:
    wrong = text.split(",")[0]
    with pytest.raises(ValueError, match=f"^'{wrong}' is not understood") as caught:
        _request.parse(text)
    names = [*inspect.signature(switch.enable).parameters, "report"]
    assert str(caught.value).endswith(", ".join(names))


class FakeTorch:
    """Stands for ``torch.cuda``: keeps what it is to call until it is initialised."""

    def __init__(self) -> None:
        self.queued: list[Callable[[], None]] = []
        self.initialized = False

    def lazy_call(self, call: Callable[[], None]) -> None:
        if self.initialized:
            call()
        else:
            self.queued.append(call)

    def init(self) -> None:
        self.initialized = True
        for call in self.queued:
            call()


@pytest.fixture
def fake_torch(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    fake = FakeTorch()
    module: Any = ModuleType("torch.cuda")
    module._lazy_call = fake.lazy_call
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    monkeypatch.setitem(sys.modules, "torch.cuda", module)
    monkeypatch.setattr(autoload, "_arranged", set())
    monkeypatch.setenv("CUDAGRAPH_POOL", "1")
    _request._enable.cache_clear()
    return fake


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What of the engines is served, each time: by name, and where that is told, for which log."""
    done: list[str] = []
    monkeypatch.setattr(vllm, "serve_all_reduce", lambda log: done.append(f"all-reduce {log}"))
    monkeypatch.setattr(vllm, "serve_estimate", lambda log: done.append(f"estimate {log}"))
    monkeypatch.setattr(autoload, "_offer_sleep_backend", lambda log: done.append(f"sleep {log}"))
    monkeypatch.setattr(sglang, "serve_memory_saver", lambda: done.append("memory saver"))
    return done


@pytest.fixture
def enabled(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, bool]]:
    """The options of each call of enable()."""
    calls: list[dict[str, bool]] = []

    def enable(share_captures: bool = False) -> None:
        calls.append({"share_captures": share_captures})

    monkeypatch.setattr(switch, "enable", enable)
    return calls


@pytest.mark.parametrize(
    ("plugin", "logger"),
    [(autoload.vllm, "vllm.cudagraph_pool"), (autoload.sglang, "cudagraph_pool")],
)
@pytest.mark.parametrize("torch_calls_too", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_plugins(
    fake_torch: FakeTorch,
    enabled: list[dict[str, bool]],
    served: list[str],
    caplog: pytest.LogCaptureFixture,
    plugin: Callable[[], None],
    logger: str,
    torch_calls_too: bool,
    late: bool,
) -> None:
    """However often and whenever they are called: enabled once, one line in the engine's log."""
    caplog.set_level(logging.INFO)
    if torch_calls_too:
        autoload.torch()
    if late:
        fake_torch.init()
    plugin()
    # What concerns no GPU is there before it: an engine asks for it when it likes.
    at_once = "memory saver" if plugin is autoload.sglang else f"sleep {logger}"
    assert served[0] == at_once
    plugin()
    if not late:
        assert (enabled, set(served)) == ([], {at_once})
        fake_torch.init()
    plugin()
    assert enabled == [{"share_captures": False}]
    vllms = [f"sleep {logger}", f"all-reduce {logger}", f"estimate {logger}"]
    assert served == (["memory saver"] * 3 if plugin is autoload.sglang else vllms)
    said = [record for record in caplog.records if record.name == logger]
    assert [record.levelno for record in said] == [logging.INFO]
    assert said[0].getMessage() == (
        "CUDAGRAPH_POOL=1: CUDA graphs are captured into pools of cudagraph_pool"
    )


@pytest.mark.parametrize("value", [None, "", "0"])
@pytest.mark.parametrize("plugin", [autoload.torch, autoload.vllm, autoload.sglang])
def test_plugins_do_nothing_unasked(
    fake_torch: FakeTorch,
    served: list[str],
    monkeypatch: pytest.MonkeyPatch,
    plugin: Callable[[], None],
    value: str | None,
) -> None:
    monkeypatch.delenv("CUDAGRAPH_POOL")
    if value is not None:
        monkeypatch.setenv("CUDAGRAPH_POOL", value)
    plugin()
    assert (fake_torch.queued, served) == ([], [])


@pytest.mark.parametrize(
    ("preload", "request_text", "mempools"),
    [
        ("", "1", {}),
        ("/lib/other.so", "1", {}),
        ("/lib/torch_memory_saver_hook_mode_preload.abi3.so", "1", {"mempools": False}),
        ("/lib/torch_memory_saver_hook_mode_preload.abi3.so", "mempools=1", {"mempools": True}),
    ],
)
def test_mempools_of_torch_memory_saver_stay_with_torch(
    monkeypatch: pytest.MonkeyPatch, preload: str, request_text: str, mempools: dict[str, bool]
) -> None:
    def enable(mempools: bool | None = None) -> None:
        chosen.update({} if mempools is None else {"mempools": mempools})

    chosen: dict[str, bool] = {}
    monkeypatch.setattr(switch, "enable", enable)
    monkeypatch.setenv("LD_PRELOAD", preload)
    _request._enable.cache_clear()
    assert _request._enable(request_text)[0] == logging.INFO
    _request._enable.cache_clear()
    assert chosen == mempools


def test_report() -> None:
    class Adapter:
        def capture_counts(self) -> dict[str, int]:
            return {"ours": 51, "base": 2}

        def most_bytes(self, device: int) -> tuple[int, int]:
            return (60 << 20, (50 << 20) - 99) if device == 1 else (0, 0)

    class Cuda:
        def device_count(self) -> int:
            return 3

        def memory_stats(self, device: int) -> dict[str, int]:
            return [{}, {"reserved_bytes.all.peak": 2 << 30}, {"reserved_bytes.all.peak": 1 << 20}][
                device
            ]

    assert _request.report_lines(Adapter(), Cuda()) == [
        "53 CUDA graph captures, 51 of them in pools of cudagraph_pool",
        "GPU 1: reserved 2,048 MiB at most; graph pools took 60 MiB, of which 50 were in use at "
        "once",
        "GPU 2: reserved 1 MiB at most; graph pools took 0 MiB, of which 0 were in use at once",
    ]


PROGRAM = """
import json, os, sys
print(json.dumps([__name__, sys.argv, sys.path[0], os.environ["CUDAGRAPH_POOL"]]))
sys.exit(int(sys.argv[1]))
"""


@needs_torch
@pytest.mark.parametrize(
    ("options", "named", "chosen"),
    [
        (["--share-captures"], ["elsewhere/program.py"], {"share_captures": True}),
        (
            ["--report", "--no-share-captures"],
            ["-m", "elsewhere.program"],
            {"share_captures": False, "report": True},
        ),
    ],
)
def test_run(
    run: Run, tmp_path: Path, options: list[str], named: list[str], chosen: dict[str, bool]
) -> None:
    path = tmp_path / "elsewhere/program.py"
    path.parent.mkdir()
    path.write_text(PROGRAM)
    arguments = ["7", "--", "--report", "-m", "x y"]
    command = ["-m", "cudagraph_pool", "run", *options, *named, *arguments]
    done = run(*command, CUDAGRAPH_POOL="what was there before")
    assert (done.returncode, done.stderr) == (7, "")
    name, (program, *given), folder, request = json.loads(done.stdout)
    assert (name, given, _request.parse(request)) == ("__main__", arguments, chosen)
    assert (tmp_path / program).samefile(path)
    assert (tmp_path / folder).samefile(tmp_path if "-m" in named else path.parent)


@needs_torch
def test_run_is_interrupted(tmp_path: Path) -> None:
    """As Python is: by the signal, and its children see the same one."""
    path = tmp_path / "program.py"
    path.write_text("import time\nprint('ready', flush=True)\ntime.sleep(300)\n")
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "cudagraph_pool", "run", str(path)],
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts what runs in its background deaf to it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert err.splitlines()[-1] == "KeyboardInterrupt"


def test_run_says_why_it_cannot(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert main(["run", "program.py"]) == 2
    assert capsys.readouterr().err == (
        "cudagraph-pool: run needs torch's entry points: unset TORCH_DEVICE_BACKEND_AUTOLOAD\n"
    )
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    assert main(["run", "program.py"]) == 2
    assert capsys.readouterr().err.endswith("to be installed: in a clone of it, pip install .\n")
