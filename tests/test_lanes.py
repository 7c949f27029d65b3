"""What the device has less for one process is told apart from what others take meanwhile."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from _lanes import Answer, Lanes

# Takes 1,000 bytes, or more and more of them.
WORKER = """
import os, sys, time

def take(size):
    with open(file + ".part", "w") as part:
        part.write(str(size))
    os.replace(file + ".part", file)

file = f"{sys.argv[1]}/{os.getpid()}"
size = 1000
take(size)
while sys.argv[2] == "grows":
    time.sleep(0.12)
    size += 7
    take(size)
if sys.argv[2] == "fails":
    sys.exit("no memory")
print('{"answer": 42}', flush=True)
input()
"""


@pytest.fixture
def lanes(tmp_path: Path) -> Lanes:
    def used() -> int:
        taken = [path for path in tmp_path.iterdir() if not path.suffix]
        return sum(int(path.read_text()) for path in taken if Path("/proc", path.name).exists())

    return Lanes(used)


def command(folder: Path, kind: str) -> list[str]:
    return [sys.executable, "-c", WORKER, str(folder), kind]


def test_what_others_take_meanwhile_is_not_counted(lanes: Lanes, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as executor:
        growing = executor.submit(lanes.ask, command(tmp_path, "grows"), os.environ, 4.0)
        for _ in range(4):
            assert lanes.ask(command(tmp_path, "holds"), os.environ, 60) == Answer(
                {"answer": 42}, 1000
            )
        assert growing.result() == "the process ended with code -9: "


def test_a_process_that_fails_says_why(lanes: Lanes, tmp_path: Path) -> None:
    said = lanes.ask(command(tmp_path, "fails"), os.environ, 60)
    assert said == "the process ended with code 1: no memory"
