"""The rules of the house, enforced: who may import whom, what stands in one file alone, what importing may cost."""

import ast
import importlib
import inspect
import json
import re
import statistics
import subprocess
import sys
import typing
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import dubito
from dubito.result import Result
from dubito.scores import SCORES
from dubito.table.columns import families

SOURCE = Path(dubito.__file__).parent
ORDER = (
    ("errors", "choices", "threads"),
    ("table",),
    ("types",),
    ("validate", "storage"),
    ("page",),
    ("result",),
    ("data", "models", "metrics"),
    ("gradients",),
    ("probes",),
    ("engines",),
    ("cache",),
    ("heads",),
    ("ensembles", "scores"),
    ("evaluate",),
    ("guard", "search", "active", "explain", "audit", "protocols", "calibration"),
    ("report",),
    ("explore", "serve"),
)
"""Floors from the ground up: a room may import itself and every room of the floors below its own."""
MAY_IMPORT = {
    room: {below for floor in ORDER[:number] for below in floor} for number, rooms in enumerate(ORDER) for room in rooms
}
IMPORT_ALL = {"cli", "__init__", "__main__"}
"""The command line and the front door."""
HEAVY = ("torch", "timm", "transformers", "faiss", "sklearn", "matplotlib", "pandas")
FINDINGS = ("evaluate", "guard", "search", "active", "explain", "audit", "protocols", "calibration")
"""Rooms whose functions report findings."""
NOT_FINDINGS = {
    "guard": {"needed", "risk_threshold", "share_threshold"},
    "active": {"add_labels"},
    "explain": {
        *("density_field", "entropy_field", "max_probability_field", "training_threshold"),
        *("ellipsoid_bounds", "ellipsoids", "exact_region", "linear_region", "two_class_region"),
        *("last_layer", "layer", "simplex"),
    },
    "calibration": {"load_calibration", "make_calibration", "save_calibration"},
    "protocols": {
        *("ambiguous_images", "class_split", "open_benchmark", "open_variant"),
        *("restrict_classes", "vote_degree", "vote_entropy"),
    },
}
"""Their functions that return numbers, tensors, tables or images instead."""
READ_IMAGES = {"cache/runner.py", "audit/duplicates.py"}
"""Outside of data/, the modules that decode images."""


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def modules() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py") if "__pycache__" not in path.parts)


@cache
def imports(code: str) -> set[str]:
    """Dotted names of all modules that code imports, at any depth of nesting."""
    names = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import hides its room"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] == "dubito"}


def room_named(name: str) -> str:
    """dubito.scores.softmax is in scores; dubito itself and the names that it exports are at the front door."""
    room = [*name.split("."), "__init__"][1]
    return room if room in MAY_IMPORT.keys() | IMPORT_ALL else "__init__"


def texts(path: Path) -> list[str]:
    """All string constants of a module, docstrings included."""
    return [
        node.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def each(paths: list[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """One test of a rule for all these modules, which names those that break it: a test per module takes longer."""

    def broken(rule: Callable[[Path], None], path: Path) -> str:
        try:
            rule(path)
        except AssertionError as error:
            return f"{path.relative_to(SOURCE)}: {error}"
        return ""

    def over(rule: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            assert [found for path in paths if (found := broken(rule, path))] == []

        test.__doc__ = rule.__doc__
        return test

    return over


def test_every_room_has_a_floor():
    assert {room_of(path) for path in modules()} <= MAY_IMPORT.keys() | IMPORT_ALL
    assert len(modules()) > 50


@each([path for path in modules() if room_of(path) not in IMPORT_ALL])
def test_a_module_imports_only_lower_floors(path):
    room = room_of(path)
    above = {room_named(name) for name in imports(path.read_text())} - MAY_IMPORT[room] - {room}
    assert not above, f"{room} must not import {', '.join(sorted(above))}"


@each(modules())
def test_private_modules_are_imported_by_their_own_room_alone(path):
    room = room_of(path)
    private = [
        name
        for name in imports(path.read_text())
        if any(part.startswith("_") and not part.startswith("__") for part in name.split(".")[1:])
    ]
    assert [name for name in private if room_named(name) != room] == []


@pytest.mark.parametrize(
    ("code", "rooms"),
    [
        ("from dubito.cache.shards import write_shard", {"cache"}),
        ("import dubito.models.wrap as w", {"models"}),
        ("from dubito import metrics, load", {"metrics", "__init__"}),
        ("import dubito", {"__init__"}),
        ("def f():\n    if True:\n        from dubito.guard import Guard", {"guard"}),
        ("import numpy, torch.nn\nfrom dubitos import x", set()),
    ],
)
def test_the_reader_of_imports_sees_them_all(code, rooms):
    assert {room_named(name) for name in imports(code)} == rooms


@each([path for path in modules() if room_of(path) != "cli"])
def test_options_of_the_command_line_are_named_in_cli_alone(path):
    own = [re.sub(r"pip install [^`'\n]*", "", text) for text in texts(path)]
    flags = [flag for text in own for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)]
    assert flags == []


@each([path for path in modules() if room_of(path) in ("table", "cache")])
def test_tables_and_caches_name_no_probe(path):
    probes = importlib.import_module("dubito.probes")
    classes = {name for name, value in vars(probes).items() if inspect.isclass(value)}
    ensembles = {name for name, family in families().items() if family.ensemble}
    words = (set(probes.PROBES) | classes | ensembles) - {"views", "members"}  # in table/; what dubito.ensemble writes
    code = ast.parse(path.read_text())
    named = {node.id for node in ast.walk(code) if isinstance(node, ast.Name)}
    named |= {node.value for node in ast.walk(code) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert not words & named
    files = {name.split(".")[2] for name in imports(path.read_text()) if name.startswith("dubito.probes.")}
    assert not files & {file.stem for file in (SOURCE / "probes").glob("*.py")} - {"registry"}


@each([path for path in modules() if room_of(path) != "data"])
def test_images_are_read_in_few_places(path):
    reads = re.search(r"\b(images|opened|originals|subset)\.read(_hashed)?\(", path.read_text())
    assert bool(reads) == (path.relative_to(SOURCE).as_posix() in READ_IMAGES)


@pytest.mark.parametrize(
    ("name", "home"),
    [
        ("FileLock", "storage/files.py"),
        ("ENOSPC", "storage/files.py"),
        ("get_close_matches", "choices.py"),
        ("DataLoader(", "cache/runner.py"),
        ("fsspec.core", "storage/locations.py"),
        ("import ray", "engines/ray.py"),
    ],
)
def test_mechanisms_have_one_home(name, home):
    users = [path.relative_to(SOURCE).as_posix() for path in modules() if name in path.read_text()]
    assert users == [home]


def test_class_names_are_unique():
    names = Counter(
        node.name for path in modules() for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)
    )
    assert [name for name, times in names.items() if times > 1] == []


@pytest.mark.parametrize("room", FINDINGS)
def test_functions_that_report_findings_return_a_result(room):
    home = importlib.import_module(f"dubito.{room}")
    functions = {name: inspect.unwrap(getattr(home, name)) for name in home.__all__}
    others = set()
    for name, function in functions.items():
        if inspect.isfunction(function):
            returned = typing.get_type_hints(function).get("return")
            if not (inspect.isclass(returned) and issubclass(returned, Result)):
                others.add(name)
    assert others == NOT_FINDINGS.get(room, set())


@each(modules())
def test_whatever_reports_findings_is_a_result(path):
    """A class with findings or records of its own is a Result: nobody writes the same printing twice."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef) and node.name != "Result":
            methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            if methods & {"findings", "records", "_repr_html_", "to_pandas"} and node.name != "Table":
                bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
                assert "Result" in bases, node.name


@pytest.mark.parametrize("name", ["dubito", "dubito.cli"])
def test_importing_is_silent_and_does_not_wait_for_torch(name):
    code = f"import sys, {name}; sys.exit(any(heavy in sys.modules for heavy in {HEAVY}))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_help_does_not_wait_for_torch():
    code = f"import sys; from dubito.cli import main; main(['--help']); sys.exit(any(map(sys.modules.get, {HEAVY})))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_front_door_is_small_and_complete():
    assert len(dubito.__all__) <= 42
    assert len(set(dubito.__all__)) == len(dubito.__all__)
    for name in dubito.__all__:
        assert getattr(dubito, name) is not None
    assert set(dubito.__all__) <= set(dir(dubito))  # completion in a notebook, before anything is imported
    with pytest.raises(AttributeError, match=r"module 'dubito' has no attribute 'lood'. Did you mean load\?"):
        _ = dubito.lood


def test_namespaces_complete():
    """`dubito.scores.` + tab shows the public names, also where the room is imported on first use."""
    rooms = ("scores", "probes", "metrics", "heads", "ensembles", "explain", "protocols", "report")
    code = f"""import dubito
for room in {rooms}:
    names = dir(getattr(dubito, room))
    assert set(getattr(dubito, room).__all__) <= set(names), (room, names)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_functions_named_like_their_room_stay_functions():
    importlib.import_module("dubito.evaluate.compare")
    importlib.import_module("dubito.audit.audit")
    assert inspect.isfunction(inspect.unwrap(dubito.evaluate))
    assert inspect.isfunction(inspect.unwrap(dubito.audit))


SCRIPTS = sorted(
    path for folder in ("experiments", "benchmarks") for path in (SOURCE.parents[1] / folder).rglob("*.py")
)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_experiments_and_benchmarks_import_names_that_exist(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "dubito":
            module = importlib.import_module(node.module or "dubito")
            assert not [alias.name for alias in node.names if not hasattr(module, alias.name)], node.module


def test_measured_figures_of_scores_are_those_of_the_experiment():
    """In docs/methods.md: the lowest, median and highest AUROC over the models of experiments/ood_choice.py."""
    root = Path(__file__).parents[1]
    models = json.loads((root / "experiments/expected/ood_choice.json").read_text())["models"].values()
    row = r"^\| `(\w+)` \|.*\| ?([\d, ]*?)(?: \(\d+ models?\))? \|[^|]*\|$"  # the last column but one
    stated = dict(re.findall(row, (root / "docs/methods.md").read_text(), re.MULTILINE))
    for name in SCORES:
        ood = [100 * one["scores"][name]["ood"] for one in models if name in one["scores"]]
        ood += [100 * one["named"][name] for one in models if name in one["named"]]
        summary = (min(ood), statistics.median(ood), max(ood)) if len(ood) > 1 else ood
        assert stated[name] == ", ".join(f"{value:.0f}" for value in summary), name
