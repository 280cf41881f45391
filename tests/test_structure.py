"""What holds for the source as a whole: direction of imports, sizes, names, docstrings, and what an import loads."""

import ast
import dataclasses
import enum
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import expertwire as ew
from expertwire.formats import WireFormat

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "expertwire"
FILES = sorted(SOURCE.rglob("*.py"))

# From the bottom up. Modules of one layer that stand in the same group may import each other; groups of one layer are
# siblings and may not.
LAYERS = [
    [{"errors"}, {"_env"}, {"_math"}],
    [{"topology"}, {"layouts"}, {"ordering"}],
    [{"protocols"}, {"formats"}],
    [{"reference"}, {"host"}, {"kernels"}, {"transports"}],
    [{"engines"}],
    [
        {
            "_check",
            "agreement",
            "autograd",
            "buffer",
            "call",
            "combine",
            "config",
            "device_autograd",
            "device_calls",
            "device_combine",
            "device_steps",
            "dispatch",
            "event",
            "handle",
            "steps",
            "world",
        }
    ],
    [{"testing"}],
    [{"cli"}],
]
PLACE = {part: (layer, group) for layer, row in enumerate(LAYERS) for group, parts in enumerate(row) for part in parts}
# (importer, imported): breaches that are known and should go.
BREACHES: set[tuple[str, str]] = set()


def part_of(path):
    """The part of the package that a file belongs to: its first folder, or its own name."""
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def imports(path):
    """(line, module) of everything below expertwire that a file imports, at any depth, type checking included."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            if node.module == "expertwire":
                found += [(node.lineno, f"expertwire.{alias.name}") for alias in node.names]
            else:
                found.append((node.lineno, node.module))
        elif isinstance(node, ast.Constant) and re.fullmatch(r"expertwire(\.\w+)+", str(node.value)):
            found.append((node.lineno, node.value))  # importlib.import_module("expertwire.x")
    return [(line, name.split(".")[1]) for line, name in found if name.startswith("expertwire.")]


def test_every_part_has_a_layer():
    assert {part_of(path) for path in FILES} - {"__init__", "__main__"} <= set(PLACE)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_downward(path):
    part = part_of(path)
    if part in ("__init__", "__main__"):
        return
    layer, group = PLACE[part]
    for line, name in imports(path):
        if name in PLACE and (part, name) not in BREACHES:
            assert PLACE[name][0] < layer or PLACE[name] == (layer, group), f"{path}:{line} imports {name}"


def test_modules_of_the_top_layer_form_no_cycle():
    graph = {path.stem: {name for _, name in imports(path)} for path in SOURCE.glob("*.py") if path.stem != "__init__"}
    done, open_ = set(), []

    def visit(name):
        assert name not in open_, f"cycle: {' -> '.join([*open_, name])}"
        if name in done or name not in graph:
            return
        open_.append(name)
        for other in graph[name] - {name}:
            visit(other)
        done.add(open_.pop())

    for name in graph:
        visit(name)


def test_ordering_knows_neither_torch_nor_protocols():
    for path in (SOURCE / "ordering").glob("*.py"):
        assert not re.search(r"^\s*(import|from) (torch|numpy|expertwire\.protocols)\b", path.read_text(), re.M), path


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_are_short_and_silent(path):
    text = path.read_text()
    assert len(text.splitlines()) <= (99 if path.name == "__init__.py" else 500)
    if part_of(path) != "cli":
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
        assert not [c.lineno for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"]
    assert "TODO" not in text
    assert "FIXME" not in text


# -- a fresh process ---------------------------------------------------------------------------------------------


def fresh(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.strip()


HEAVY = ["torch", "numpy", "numba", "llvmlite", "triton", "rich", "typer", "mpi4py"]


def test_import_loads_nothing_heavy():
    loaded = fresh(f"import sys, expertwire; dir(expertwire); print([m for m in {HEAVY} if m in sys.modules])")
    assert loaded == "[]"


def test_buffer_loads_no_kernel_compiler_and_no_device():
    code = (
        "import sys, torch, expertwire; [getattr(expertwire, name) for name in expertwire.__all__]\n"
        "print([m for m in ('numba', 'llvmlite', 'triton') if m in sys.modules], torch.cuda.is_initialized())"
    )
    assert fresh(code) == "[] False"


def test_import_is_quick():
    code = "import time; began = time.perf_counter(); import expertwire; print(time.perf_counter() - began)"
    assert min(float(fresh(code)) for _ in range(5)) < 0.050


# -- names and docstrings ----------------------------------------------------------------------------------------

PUBLIC = [
    "BF16",
    "Buffer",
    "BufferClosed",
    "Combined",
    "Dispatched",
    "ExpertWireError",
    "FP8Block",
    "GroupMismatch",
    "Handle",
    "HandleError",
    "InFlightError",
    "InvalidArgument",
    "Layout",
    "LogFMT10",
    "PeerError",
    "PeerLost",
    "PeerMasked",
    "PeerRefused",
    "PeerTimeout",
    "Placement",
    "Statistics",
    "TransportBroken",
    "TransportUnavailable",
    "World",
    "WorldAborted",
]


def test_the_public_names():
    assert sorted(ew.__all__) == ew.__all__
    assert ew.__all__ == PUBLIC
    for name in ew.__all__:
        assert getattr(ew, name).__name__ == name
        assert name in dir(ew)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ew.nothing


def test_type_checkers_see_the_same_names():
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    (guarded,) = [n for n in tree.body if isinstance(n, ast.If)]
    assert sorted(alias.name for node in guarded.body for alias in node.names) == ew.__all__
    assert sorted(ew._HOME_OF) == ew.__all__


def test_every_error_is_an_expertwire_error():
    for name, thing in vars(sys.modules["expertwire.errors"]).items():
        if inspect.isclass(thing) and issubclass(thing, BaseException):
            assert issubclass(thing, ew.ExpertWireError), name
            assert name in ew.__all__, name


@pytest.mark.parametrize("name", ew.__all__)
def test_public_things_are_documented(name):
    thing = getattr(ew, name)
    assert thing.__doc__
    assert not thing.__doc__.startswith(f"{name}("), "a dataclass without a docstring"
    for attribute, value in vars(thing).items():
        if attribute.startswith("_") or isinstance(value, enum.Enum):
            continue
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        is_wire_method = "expertwire.formats" in thing.__module__ and attribute in vars(WireFormat)
        if inspect.isfunction(function) and not is_wire_method:  # WireFormat documents them once for all formats
            assert function.__doc__, f"{name}.{attribute}"


@pytest.mark.parametrize("record", ["Dispatched", "Combined", "Statistics"])
def test_every_field_of_a_record_is_documented(record):
    kind = getattr(ew, record)
    for field in dataclasses.fields(kind):
        name = re.sub(r"_list$", "", field.name)
        assert name in kind.__doc__ or field.name.endswith("_list"), f"{record}.{field.name}"
    with pytest.raises(dataclasses.FrozenInstanceError):
        object.__new__(kind).x = 1


def test_every_module_says_what_it_is():
    missing = [str(p) for p in FILES if p.read_text().strip() and not ast.get_docstring(ast.parse(p.read_text()))]
    assert missing == []


# -- documents ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/design.md"])
def test_links_resolve(name):
    page = ROOT / name
    if not page.exists():
        pytest.skip(f"{name} does not exist yet")
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not target.startswith(("http://", "https://", "mailto:", "#")):
            assert (page.parent / target.partition("#")[0]).exists(), f"{name} links to {target}"


def test_test_files_have_unique_names():
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert sorted(names) == sorted(set(names))
