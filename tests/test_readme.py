"""The README's Python is run as it stands, on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

from pool import Pool

from annotate_fsdp import plan_annotated
from annotate_fsdp.train.registry import model_names
from annotate_fsdp.train.target import build_target

README = Path(__file__).parent.parent / "README.md"
MODELS = README.parent / "models"


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


def reference_models() -> dict[str, tuple[int, ...]]:
    """The README's table: lines of marks, units at the tiny and the released size, parameters."""
    rows = re.findall(
        r"^\| `(\w+)` \|[^|]*\| (\d+) \| (\d+) \| (\d+) \| ([\d,]+) \|$", README.read_text(), re.M
    )
    return {name: tuple(int(number.replace(",", "")) for number in numbers) for name, *numbers in rows}


def test_the_table_of_the_reference_models_is_right() -> None:
    table = reference_models()
    assert tuple(sorted(table)) == model_names()
    for name, (lines, tiny, released, parameters) in table.items():
        source = [line for file in (MODELS / name).glob("*.py") for line in file.read_text().splitlines()]
        assert sum("fsdp_unit" in line and "import" not in line for line in source) == lines
        assert len(plan_annotated(build_target(name, "tiny", None), lowering="unit")) == tiny
        plan = plan_annotated(build_target(name, "released", None), lowering="unit")
        assert len(plan) == released
        assert sum(parameter.numel for unit in plan.units for parameter in unit.parameters) == parameters


def test_the_first_block_is_the_thirty_second_example() -> None:
    first = python_blocks()[0]
    assert "@fsdp_unit(policy=" in first
    assert "__fsdp_dtype__" in first
    assert "shard_annotated(model, mesh, mp_policy=mp_policy)" in first
    assert len(first.splitlines()) < 60
