"""The README's Python is run as it stands, on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

from pool import Pool

README = Path(__file__).parent.parent / "README.md"


def python_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)


def run_blocks() -> list[str]:
    namespace: dict[str, object] = {"__name__": "readme"}
    for block in python_blocks():
        exec(compile(block, str(README), "exec", dont_inherit=True), namespace)
    return sorted(name for name in namespace if name in ("model", "plan", "observation"))


def test_every_python_block_of_the_readme_runs(ranks: Pool) -> None:
    assert len(python_blocks()) >= 2
    assert ranks.run(run_blocks) == [["model", "observation", "plan"]] * 2


def test_the_first_block_is_the_thirty_second_example() -> None:
    first = python_blocks()[0]
    assert "@fsdp_unit(policy=" in first
    assert "__fsdp_dtype__" in first
    assert "shard_annotated(model, mesh, mp_policy=mp_policy)" in first
    assert len(first.splitlines()) < 60
