"""The project's habits, held by tests: style, types, which file may know what, and what gets installed."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "annotate_fsdp"
MODELS = ROOT / "models"

#: Imports run one way: each module imports only from those above it. `__init__` is the package's public face.
ORDER = [
    "errors",
    "catalogue",
    "marks",
    "policies",
    "collect",
    "collectives",
    "traffic",
    "events",
    "schedule",
    "plan",
    "planner",
    "inversion",
    "lowering",
    "checks",
    "hazards",
    "boundary",
    "introspect",
    "gathered",
    "agree",
    "apply",
    "shard",
    "render",
    "slots",
    "loading",
    "materialize",
    "probes",
    "observation",
    "verdict",
    "lockstep",
    "observe",
    "links",
    "cost",
    "audit",
    "__init__",
    "interop",
    "models",
    "train",
    "cli",
]

#: What only `introspect.py` may name: FSDP2's private state, and how to get at it.
PRIVATE_FSDP = re.compile(
    r"_fully_shard|_get_(module_)?fsdp_state|_fsdp_\w+|FSDP(State|Param|ParamGroup)|fsdp_params?|_sharded_param\w*"
)

TOP_LEVEL = {"pyproject.toml", "annotate_fsdp", "models", "tests", "README.md"}

#: Places on one machine that must not be written into the project.
MACHINE_PATH = re.compile(rb"(?<![\w.-])/(work|tmp/\w+|root|home)/")


def tracked_files() -> list[str]:
    """Paths of all files under version control, relative to the root of the repository."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True)
    return [path for path in listing.stdout.split("\0") if path and os.path.lexists(ROOT / path)]


def python_files(*roots: Path) -> list[Path]:
    """Python files below `roots`; a linked directory is not entered."""
    return sorted(path for root in roots for path in root.rglob("*.py") if not linked(path))


def linked(path: Path) -> bool:
    return any(parent.is_symlink() for parent in path.parents)


def name_in_order(path: Path) -> str:
    """The entry of `ORDER` that a file of the package belongs to: its own name, or that of its directory."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every imported name, fully qualified (`package.module.name`), with its line; also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno


def identifiers(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every name, attribute, imported part and one-word string literal, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value, node.lineno
    for name, line in imports(tree):
        for part in name.split("."):
            yield part, line


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def own_module(name: str) -> str | None:
    """The entry of `ORDER` that an imported name belongs to; None when it comes from elsewhere."""
    parts = name.split(".")
    if parts[0] != "annotate_fsdp":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in ORDER else "__init__"


def run_tool(*arguments: str) -> None:
    """Run a module as a command at the root of the repository; its output is the failure's message."""
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout}{done.stderr}"


def test_ruff_finds_nothing() -> None:
    run_tool("ruff", "check", "--no-cache", ".")


def test_ruff_would_format_nothing() -> None:
    run_tool("ruff", "format", "--check", "--diff", "--no-cache", ".")


def test_mypy_finds_nothing() -> None:
    run_tool("mypy")


@pytest.mark.parametrize("path", python_files(PACKAGE, MODELS), ids=lambda path: str(path.relative_to(ROOT)))
def test_everything_public_has_a_docstring(path: Path) -> None:
    tree = parsed(path)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    public = [node for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]
    missing = [
        f"{path.name}:{node.lineno} {node.name}"
        for node in public
        if not ast.get_docstring(node) and "overload" not in map(ast.unparse, node.decorator_list)
    ]
    assert not missing
    assert ast.get_docstring(tree), "the module itself"


@pytest.mark.parametrize("path", python_files(PACKAGE), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_one_way(path: Path) -> None:
    name = name_in_order(path)
    assert name in ORDER, f"{path.name} has no place in the order of imports"
    above = ORDER[: ORDER.index(name)]
    same = [name] if path.parent != PACKAGE else []
    wrong = [
        f"{path.name}:{line} imports {imported}"
        for imported, line in imports(parsed(path))
        if own_module(imported) not in [None, *above, *same]
    ]
    assert not wrong


@pytest.mark.parametrize("path", python_files(MODELS), ids=lambda path: str(path.relative_to(ROOT)))
def test_models_know_marks_and_nothing_else_about_sharding(path: Path) -> None:
    is_sidecar = path.name == "parallelization.py"
    allowed = [None, "__init__", "marks", "models", *(["interop"] if is_sidecar else [])]
    wrong = [
        f"{path.name}:{line} imports {imported}"
        for imported, line in imports(parsed(path))
        if own_module(imported) not in allowed
        or (imported.startswith("torch.distributed") and not is_sidecar)
        or ("parallelization" in imported.split(".") and path.name != "__init__.py")
    ]
    assert not wrong


def test_only_apply_and_the_loop_it_is_measured_against_know_fully_shard() -> None:
    uses = uses_outside("apply.py", re.compile("fully_shard"))
    assert {use.partition(":")[0] for use in uses} == {"annotate_fsdp/train/by_hand.py"}


def test_only_introspect_reads_private_fsdp_state() -> None:
    assert uses_outside("introspect.py", PRIVATE_FSDP) == []


def uses_outside(file: str, pattern: re.Pattern[str]) -> list[str]:
    """Where an identifier that `pattern` matches as a whole stands in any file of the library but `file`."""
    return [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in python_files(PACKAGE, MODELS)
        if path != PACKAGE / file
        for name, line in identifiers(parsed(path))
        if pattern.fullmatch(name)
    ]


def test_private_fsdp_names_are_recognised_and_public_ones_are_not() -> None:
    private = [
        "_fully_shard",
        "_get_fsdp_state",
        "_get_module_fsdp_state",
        "_fsdp_param_group",
        "FSDPParamGroup",
    ]
    public = ["fully_shard", "FSDPModule", "__fsdp_unit__", "fsdp_unit", "_get_state"]
    assert [name for name in private + public if PRIVATE_FSDP.fullmatch(name)] == private


def test_top_level_holds_only_what_it_should() -> None:
    top = {path.split("/")[0] for path in tracked_files()}
    assert {name for name in top if not name.startswith(".")} <= TOP_LEVEL


def test_no_file_names_a_place_on_one_machine() -> None:
    found = [
        f"{path}: {match.group().decode()}"
        for path in tracked_files()
        if (ROOT / path).is_file()
        for match in MACHINE_PATH.finditer((ROOT / path).read_bytes())
    ]
    assert not found


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tracked files, so that building leaves nothing in the repository."""
    copy = tmp_path_factory.mktemp("checkout")
    for path in tracked_files():
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, copy / path, follow_symlinks=False)
    return copy


def where_imported(python: str | Path, cwd: Path, path: Path | None) -> list[Path]:
    """Import the package and its models in a new process; return the directories that they came from."""
    code = "import annotate_fsdp as a, annotate_fsdp.models.step5 as m; print(a.__file__); print(m.__file__)"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    command = [str(python), "-c", code]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [Path(line).parent for line in done.stdout.splitlines()]


def test_bare_checkout_imports_with_its_models(checkout: Path, tmp_path: Path) -> None:
    package = checkout / "annotate_fsdp"
    assert where_imported(sys.executable, tmp_path, checkout) == [package, package / "models" / "step5"]


@pytest.mark.slow
def test_wheel_holds_every_module_once_and_imports(checkout: Path, tmp_path: Path) -> None:
    run_tool("pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(checkout))
    (wheel,) = tmp_path.glob("annotate_fsdp-*.whl")
    archive = zipfile.ZipFile(wheel)
    names = [name for name in archive.namelist() if ".dist-info/" not in name]
    expected = [str(path.relative_to(ROOT)) for path in python_files(PACKAGE)] + ["annotate_fsdp/py.typed"]
    expected += [f"annotate_fsdp/{path.relative_to(ROOT)}" for path in python_files(MODELS)]
    assert sorted(names) == sorted(expected)

    unpacked = tmp_path / "unpacked"
    archive.extractall(unpacked)
    package = unpacked / "annotate_fsdp"
    assert where_imported(sys.executable, tmp_path, unpacked) == [package, package / "models" / "step5"]


@pytest.mark.slow
def test_editable_install_imports_with_its_models(checkout: Path, tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    venv.create(environment, symlinks=True)
    (site,) = environment.glob("lib/python*/site-packages")
    borrowed = [entry for entry in sys.path if entry.endswith("-packages")]  # torch, wrapt, setuptools
    (site / "borrowed.pth").write_text("\n".join(borrowed))
    python = environment / "bin" / "python"
    # `--ignore-installed`: the package may be installed among what is borrowed, and is left alone there.
    flags = ["--no-deps", "--no-build-isolation", "--ignore-installed"]
    run_tool("pip", "--python", str(python), "install", *flags, "--editable", str(checkout))
    package, models = where_imported(python, tmp_path, None)
    assert package == checkout / "annotate_fsdp"
    assert models.resolve() == (checkout / "models" / "step5").resolve()
