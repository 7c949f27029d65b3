"""The pytest plugin, on an adapter that only counts: what it says, and when it fails a run."""

from __future__ import annotations

import pytest

from cudagraph_pool import _adapter, switch

pytest_plugins = ["pytester"]

ON = ("-p", "cudagraph_pool.testing", "--cudagraph-pool")
CAPTURING = """
from cudagraph_pool import _adapter
counts = _adapter.load_adapter().counts
counts["{kind}"] += 1  # at import: the package is enabled before the suite is collected
def test_capture():
    counts["{kind}"] += 2
"""


class FakeAdapter:
    """Counts as the adapter does; captures count only once it is enabled."""

    def __init__(self) -> None:
        self.counts = {"ours": 5, "base": 7}  # of an earlier run in this process
        self.enabled = 0

    def enable(self) -> None:
        self.enabled += 1

    def capture_counts(self) -> dict[str, int]:
        return dict(self.counts)


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> FakeAdapter:
    fake = FakeAdapter()
    monkeypatch.setattr(_adapter, "load_adapter", lambda: fake)
    monkeypatch.setattr(switch, "enable", fake.enable)
    return fake


COUNTS = "CUDA graph captures: {} in pools of cudagraph_pool, 3 in PyTorch's own"
NONE_OURS = "FAILED: graphs were captured, but none in a pool of cudagraph_pool"
NOTHING = "def test_nothing(): pass"


@pytest.mark.parametrize(
    ("kinds", "suite", "code", "said"),
    [
        (["ours", "base"], "", pytest.ExitCode.OK, ["=* cudagraph_pool =*", COUNTS.format(3)]),
        (["base"], "", pytest.ExitCode.TESTS_FAILED, [COUNTS.format(0), NONE_OURS, "=*1 passed*"]),
        ([], NOTHING, pytest.ExitCode.OK, ["no CUDA graph was captured: *"]),
        ([], "def test_wrong(): assert False", pytest.ExitCode.TESTS_FAILED, ["=*1 failed*"]),
        ([], "", pytest.ExitCode.NO_TESTS_COLLECTED, []),
        # Only a run that would pass is failed: one that was interrupted must go on saying so.
        (["base"], "import pytest; pytest.exit('enough')", pytest.ExitCode.INTERRUPTED, []),
    ],
)
def test_counts_captures_and_leaves_other_verdicts_alone(
    pytester: pytest.Pytester,
    adapter: FakeAdapter,
    kinds: list[str],
    suite: str,
    code: pytest.ExitCode,
    said: list[str],
) -> None:
    pytester.makepyfile(suite, **{f"test_{kind}": CAPTURING.format(kind=kind) for kind in kinds})
    result = pytester.runpytest_inprocess(*ON)
    assert result.ret == code
    assert adapter.enabled == 1
    result.stdout.fnmatch_lines(said)
    if code == pytest.ExitCode.OK:
        result.stdout.no_fnmatch_line("FAILED*")


def test_without_the_option_nothing_happens(
    pytester: pytest.Pytester, adapter: FakeAdapter
) -> None:
    pytester.makepyfile(CAPTURING.format(kind="base"))
    result = pytester.runpytest_inprocess("-p", "cudagraph_pool.testing")
    assert result.ret == pytest.ExitCode.OK
    assert adapter.enabled == 0
    result.stdout.no_fnmatch_line("*cudagraph_pool*")


def test_refuses_to_be_spread_over_processes(
    pytester: pytest.Pytester, adapter: FakeAdapter
) -> None:
    # A stand-in for pytest-xdist, which need not be installed: its option alone decides.
    pytester.makepyfile(
        xdist_like="def pytest_addoption(parser): parser.addoption('--dist', default='no')",
        test_nothing="def test_nothing(): pass",
    )
    pytester.syspathinsert()
    spread = pytester.runpytest_inprocess("-p", "no:xdist", "-p", "xdist_like", "--dist=load", *ON)
    assert spread.ret == pytest.ExitCode.USAGE_ERROR
    spread.stderr.fnmatch_lines(["ERROR: --cudagraph-pool * without pytest-xdist (-n 0)"])
    assert adapter.enabled == 0
    whole = pytester.runpytest_inprocess("-p", "no:xdist", "-p", "xdist_like", *ON)
    assert whole.ret == pytest.ExitCode.OK


@pytest.mark.parametrize("kind", [ImportError, RuntimeError])
def test_says_why_the_package_cannot_be_enabled(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Exception],
) -> None:
    def enable() -> None:
        raise kind("there is no GPU; get one")

    monkeypatch.setattr(switch, "enable", enable)
    pytester.makepyfile("def test_nothing(): pass")
    result = pytester.runpytest_inprocess(*ON)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --cudagraph-pool: there is no GPU; get one"])
    result.stdout.no_fnmatch_line("*Traceback*")
