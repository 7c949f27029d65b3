"""The rules that csrc/testing/ablate.py takes out are the core's, and docs/ablation.md has them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE = ROOT / "csrc/core"

pytestmark = pytest.mark.skipif(not CORE.is_dir(), reason="the C++ sources are not here")

ablate = pytest.importorskip("ablate")


def test_each_rule_is_in_the_core_and_in_the_table() -> None:
    text = "".join(path.read_text() for path in CORE.rglob("*.cc"))
    asked = [name for call in re.findall(r"\bOn\((.*?)\)", text) for name in call.split('"')[1::2]]
    assert sorted(set(asked)) == sorted(ablate.RULES)
    document = (ROOT / "docs/ablation.md").read_text()
    assert re.findall(r"^\| ([a-z-]+) \|", document, re.MULTILINE) == list(ablate.RULES)
