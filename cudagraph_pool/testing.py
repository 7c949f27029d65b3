"""A pytest plugin that runs any suite with the package enabled.

``pytest -p cudagraph_pool.testing --cudagraph-pool`` says at the end how many CUDA graph captures
went through its pools and how many through PyTorch's own, and fails if only the latter did some.
Those in processes that the suite starts are neither redirected nor counted.
"""

from __future__ import annotations  # pytest.TerminalReporter is new

from collections.abc import Mapping

import pytest

from . import _adapter, switch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("cudagraph_pool").addoption(
        "--cudagraph-pool",
        action="store_true",
        help="let CUDA graph captures of the whole run allocate in pools of cudagraph_pool",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--cudagraph-pool"):
        config.pluginmanager.register(_EnabledRun(), "cudagraph_pool_enabled_run")


class _EnabledRun:
    """Hooks of a run with the option; without it none of them is there."""

    _before: Mapping[str, int]  # another run in this process may have counted before

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        # pytest-xdist's: the tests would run in other processes than this one.
        if session.config.getoption("dist", "no") != "no":
            raise pytest.UsageError(
                "--cudagraph-pool enables the pool in one process and counts there: "
                "run the suite without pytest-xdist (-n 0)"
            )
        try:
            switch.enable()
        except (ImportError, RuntimeError) as error:
            raise pytest.UsageError(f"--cudagraph-pool: {error}") from error
        self._before = _adapter.load_adapter().capture_counts()

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        ours, base = self._captures()
        passed = session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        if base and not ours and passed:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        ours, base = self._captures()
        terminalreporter.section("cudagraph_pool")
        line = f"CUDA graph captures: {ours} in pools of cudagraph_pool, {base} in PyTorch's own"
        nothing = "no CUDA graph was captured: the pool was not put to the test"
        terminalreporter.line(line if ours + base else nothing)
        if base and not ours:
            failed = "FAILED: graphs were captured, but none in a pool of cudagraph_pool"
            terminalreporter.line(failed, red=True)

    def _captures(self) -> tuple[int, int]:
        now = _adapter.load_adapter().capture_counts()
        return now["ours"] - self._before["ours"], now["base"] - self._before["base"]
