"""The mutants that csrc/testing/mutate.py plants apply; the rules that csrc/testing/ablate.py takes
out are those of the core, and docs/ablation.md has a row for each.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CSRC = ROOT / "csrc"

pytestmark = pytest.mark.skipif(not CSRC.is_dir(), reason="the C++ sources are not here")

sys.path.insert(0, str(CSRC / "testing"))
ablate = pytest.importorskip("ablate")
mutants = pytest.importorskip("mutants")


def test_each_text_stands_once() -> None:
    """Who changes a line that a mutant names changes the mutant too."""
    assert mutants.MUTANTS
    for mutant in mutants.MUTANTS:
        text = (CSRC / mutant.folder / mutant.file).read_text()
        assert text.count(mutant.search) == 1, f"{mutant.name} does not apply to {mutant.file}"


def test_each_rule_is_in_the_core() -> None:
    text = "".join(path.read_text() for path in (CSRC / "core").rglob("*.cc"))
    asked = [name for call in re.findall(r"\bOn\((.*?)\)", text) for name in call.split('"')[1::2]]
    assert sorted(set(asked)) == sorted(ablate.RULES)


def test_each_rule_has_one_row() -> None:
    document = (ROOT / "docs" / "ablation.md").read_text()
    rows = re.findall(r"^\| ([a-z-]+) \|", document, re.MULTILINE)
    assert rows == list(ablate.RULES)
