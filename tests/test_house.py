"""The shape of the house: imports point one way, files stay small, planning needs no torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping, Set
from functools import cache
from pathlib import Path
from typing import TypeGuard

import pytest

import penstock
from tests import public_names

LAYERS = (
    {"errors"},
    {"types"},
    {"launcher", "torch_private"},
    {"schedules"},
    {"plain_values"},
    {"trace"},
    {"simulator"},
    {"model"},
    {"costs"},
    {"sharding"},
    {"planner"},
    {"mesh"},
    {"transport"},
    {"runtime"},
    {"optim"},
    {"checkpoint"},
    {"pipeline"},
    {"equality"},
    {"doctor"},
    {"automatic"},
    {"__init__"},
    {"integrations"},
    {"cli"},
    {"__main__"},
)
"""Who may import whom: a module takes only from its own folder and from lines above its own.
Imports for types only, under `if TYPE_CHECKING:`, are aside.

    errors  types                 the words
       └► torch_private           what torch hides
       └► launcher                who started this process
       └► schedules               WHEN
             └► plain_values      values in files
             └► trace             SEEN
                  └► simulator    PREDICT
                       └► model   WHAT IS CUT
    ┌──────────────────────┘
    └► costs                      WHAT IT COSTS
          └► sharding             WHO, INSIDE
               └► planner         WHO
                    └► mesh       WITH WHOM
    ┌─────────────────────┘
    └► transport                  HOW IT MOVES
          └► runtime              DO
    ┌──────────┘
    └► optim                      clipping, loss scaling
          └► checkpoint           save and load; weights to start from
               └► pipeline        the front door
    ┌──────────────────────┘
    └► equality                   is it the unsplit model?
          └► doctor               BEFORE IT RUNS
               └► automatic       ALL AT ONCE: planned and run in one line
    ┌───────────────────┘
    └► __init__                   the public names, found when asked for
          └► cli
               └► __main__
"""

AT_THE_TOP = {
    *("__init__", "__main__", "errors", "launcher", "pipeline"),
    *("plain_values", "torch_private", "types"),
}
"""Modules that stand in no folder: the front door, errors, types, and what every room may need."""
WITHOUT_TORCH = ("schedules", "simulator", "trace", "costs/cluster", "sharding", "planner")
MOST_LINES, MOST_LINES_OF_THE_FRONT_DOOR = 400, 620
TORCH_PRIVATE = "penstock.torch_private"
PYTHONS_PRIVATE = {"_replace", "_exit", "_getframe"}
BANNED = "chunk"

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "penstock").rglob("*.py"))
SOURCES = [
    path
    for folder in ("penstock", "recipes/penstock_recipes", "tests", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


@cache
def parsed(source: str) -> ast.Module:
    """Parse a file once, whichever tests look at it."""
    return ast.parse(source)


@cache
def nodes_of(source: str) -> list[ast.AST]:
    """List all nodes of a file once."""
    return list(ast.walk(parsed(source)))


def part_of(name: str) -> str:
    """Give the folder or module right under penstock/ that holds the module called `name`."""
    return [*name.split("."), "__init__"][1]


def module_name(path: Path) -> str:
    """Give the dotted name of the module in `path`; a package's ends in __init__."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def is_for_types(node: ast.AST) -> TypeGuard[ast.If]:
    """Tell whether what is in a block is read by a type checker only, and runs never."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imported_parts(source: str, importer: str) -> set[str]:
    """Give the parts of penstock that `source`, as the module `importer`, imports when it runs."""
    names: set[str] = set()
    nodes = nodes_of(source)
    for_types = {id(node) for block in nodes if is_for_types(block) for node in block.body}
    for node in nodes:
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = importer.split(".")[: -node.level] if node.level else []
            base = ".".join([*package, *([node.module] if node.module else [])])
            names.update(f"{base}.{a.name}" if base == "penstock" else base for a in node.names)
    parts = {part_of(name) for name in names if name.split(".")[0] == "penstock"}
    known = set().union(*LAYERS)
    return {part if part in known else "__init__" for part in parts}


def may_import(importer: str, imported: str) -> bool:
    """Say whether LAYERS lets the part `importer` take something from the part `imported`."""
    if importer == imported:
        return True
    height = {part: line for line, parts in enumerate(LAYERS) for part in parts}
    return height[imported] < height[importer]


def bound_names(source: str) -> Iterator[str]:
    """Yield every name that `source` gives to something; names it merely uses are not its own."""
    for node in nodes_of(source):
        match node:
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                yield name
            case ast.Name(name, ast.Store()) | ast.Attribute(_, name, ast.Store()) | ast.arg(name):
                yield name
            case ast.alias(_, str(name)) | ast.ExceptHandler(_, str(name)):
                yield name
            case (
                ast.MatchAs(_, str(name))
                | ast.MatchStar(str(name))
                | ast.MatchMapping(_, _, str(name))
            ):
                yield name


def private_names(source: str, *, elsewhere: Set[str] = frozenset()) -> set[str]:
    """Find what a file names with a leading underscore that is neither its own nor Python's.

    That are modules, attributes of what is not `self`, and strings that are one of `elsewhere`.
    """
    own = {*bound_names(source), *PYTHONS_PRIVATE} - elsewhere
    found: set[str] = set()
    for node in nodes_of(source):
        match node:
            case ast.ImportFrom(str(module), names, 0) if not module.startswith("penstock"):
                found.update(part for part in module.split(".") if part.startswith("_"))
                found.update(alias.name for alias in names if alias.name.startswith("_"))
            case ast.Import(names):
                found.update(p for a in names for p in a.name.split(".") if p.startswith("_"))
            case ast.Attribute(value, name) if name.startswith("_") and name not in own:
                if not (isinstance(value, ast.Name) and value.id in ("self", "cls")):
                    found.add(name)
            case ast.Constant(str(text)) if text in elsewhere:
                found.add(text)
    return {name for name in found if not name.endswith("__")}


@cache
def kept_private_names() -> set[str]:
    """Return those that the one file for them names."""
    return private_names((ROOT / "penstock" / "torch_private.py").read_text())


def run_python(program: str, *arguments: str) -> None:
    """Run `program` in a fresh interpreter; fail with what it printed if it fails."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_imports_point_one_way() -> None:
    for path in MODULES:
        importer = part_of(module_name(path))
        assert any(importer in parts for parts in LAYERS), f"{importer} has no place in LAYERS yet"
        imported = imported_parts(path.read_text(), module_name(path))
        assert [part for part in sorted(imported) if not may_import(importer, part)] == [], path


def imported_files(path: Path, files: Set[str], *, for_types: bool = False) -> set[str]:
    """Return which of our files one imports, in functions too; `for_types` only, if asked."""
    package = list(path.relative_to(ROOT).with_suffix("").parts[:-1])
    found: set[str] = set()

    def look(node: ast.AST) -> None:
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.ImportFrom):
                base = package[: len(package) - part.level + 1] if part.level else []
                module = ".".join([*base, *([part.module] if part.module else [])])
                names = {f"{module}.{alias.name}" for alias in part.names}
                found.update(names & files or {module})
            elif isinstance(part, ast.Import):
                found.update(alias.name for alias in part.names)
            elif for_types or not is_for_types(part):
                look(part)

    look(parsed(path.read_text()))
    return found & files


def circles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the groups of files that import each other, by whatever way."""
    reached: dict[str, set[str]] = {}
    for name in imports:
        waiting, seen = [name], set[str]()
        while waiting:
            new = imports[waiting.pop()] - seen
            seen |= new
            waiting += new
        reached[name] = seen
    groups = {tuple(sorted(b for b in reached[a] if a in reached[b])) for a in imports}
    return sorted(list(group) for group in groups if len(group) > 1)


PRINTED = [
    ["schedules.ir", "schedules.text"],
    ["schedules.names", "schedules.searched"],
    ["trace.breakdown", "trace.looks", "trace.timeline"],
]
"""Values that know how they are written or taken apart: that is imported when it is asked for."""


def test_no_files_import_each_other() -> None:
    paths = {module_name(path): path for path in MODULES}
    imports = {name: imported_files(path, paths.keys()) - {name} for name, path in paths.items()}
    found = [[name.partition(".")[2] for name in circle] for circle in circles(imports)]
    assert found == PRINTED


def test_some_rooms_have_no_circle_of_imports_not_even_for_types() -> None:
    paths = {module_name(path): path for path in MODULES}
    found = {
        name: imported_files(path, paths.keys(), for_types=True) for name, path in paths.items()
    }
    circle = {name for group in circles(found) for name in group}
    rooms = (
        *("penstock.runtime.", "penstock.pipeline", "penstock.checkpoint.", "penstock.optim."),
        *("penstock.costs.", "penstock.model."),
    )
    assert sorted(name for name in circle if name.startswith(rooms)) == []


@pytest.mark.parametrize(
    ("room", "may"),
    [
        ("cluster", {"cluster"}),
        ("", {"", "cluster"}),
        ("counting", {"", "counting"}),
        ("measuring", {"", "counting", "measuring"}),
    ],
)
def test_costs_are_recorded_below_what_counts_and_what_measures_them(
    room: str, may: set[str]
) -> None:
    folders = {module_name(p): p.parent.name for p in MODULES if "costs" in p.parts[-3:-1]}
    own = {name: "" if folder == "costs" else folder for name, folder in folders.items()}
    for path in MODULES:
        if own.get(module_name(path)) == room:
            imported = imported_files(path, own.keys(), for_types=True)
            assert {own[name] for name in imported} <= may, path


def test_a_circle_of_imports_is_found_however_long() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []


def test_no_module_stands_loose_at_the_top() -> None:
    at_the_top = {path.stem for path in (ROOT / "penstock").glob("*.py")}
    assert at_the_top == AT_THE_TOP


@pytest.mark.parametrize(
    ("statement", "part"),
    [
        ("import penstock", "__init__"),
        ("import penstock.runtime.run", "runtime"),
        ("from penstock import Pipeline", "__init__"),
        ("from penstock import errors", "errors"),
        ("from penstock.runtime import run", "runtime"),
        ("from .ir import Forward", "schedules"),
        ("from . import ir", "schedules"),
        ("from ..runtime import run", "runtime"),
        ("from .. import runtime", "runtime"),
        ("def late() -> None:\n    from penstock.doctor import facts", "doctor"),
    ],
)
def test_every_way_to_write_an_import_is_seen(statement: str, part: str) -> None:
    assert imported_parts(statement, "penstock.schedules.gpipe") == {part}


def test_an_import_for_types_only_is_none() -> None:
    source = (
        "if TYPE_CHECKING:\n    from penstock import Pipeline\nelse:\n    import penstock.runtime"
    )
    assert imported_parts(source, "penstock.schedules.gpipe") == {"runtime"}


def test_an_import_against_the_arrow_is_refused() -> None:
    assert may_import("runtime", "schedules")
    assert may_import("runtime", "runtime")
    assert not may_import("schedules", "runtime")


def test_private_names_of_torch_stand_in_one_file() -> None:
    elsewhere = kept_private_names()
    for path in MODULES:
        if module_name(path) != TORCH_PRIVATE:
            assert sorted(private_names(path.read_text(), elsewhere=elsewhere)) == [], path


def test_every_way_to_name_something_private_is_seen() -> None:
    theirs = (
        "import torch._dynamo\n"
        "from torch._C import Graph\n"
        "from torch.nn.modules.dropout import _DropoutNd\n"
        "def function(self, module):\n"
        "    return module._buffers, torch._sample(), getattr(module, '_parameters')\n"
    )
    names = {"_dynamo", "_C", "_DropoutNd", "_buffers", "_sample", "_parameters"}
    assert private_names(theirs, elsewhere={"_parameters"}) == names
    ours = (
        "from penstock.plan import _cut\n"
        "class A:\n"
        "    def __init__(self, other):\n"
        "        self._modules = other._modules\n"
        "        other.__class__ = entry._replace(a=self._b)\n"
    )
    assert private_names(ours) == set()
    assert private_names(ours, elsewhere={"_modules"}) == {"_modules"}


def test_no_file_is_long() -> None:
    for path in MODULES:
        most = MOST_LINES_OF_THE_FRONT_DOOR if path.stem == "pipeline" else MOST_LINES
        assert len(path.read_text().splitlines()) <= most, path


def test_planning_and_records_of_costs_work_where_torch_is_not_installed() -> None:
    """Records of costs are the modules right in costs/, and all of costs/cluster/."""
    folders = [path for room in WITHOUT_TORCH for path in ROOT.glob(f"penstock/{room}/**/*.py")]
    names = {module_name(path) for path in (*folders, *ROOT.glob("penstock/costs/*.py"))}
    run_python(
        "import importlib, sys\n"
        "sys.modules['torch'] = None\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n",
        *sorted(name.removesuffix(".__init__") for name in names),
    )


def test_what_needs_no_torch_does_not_import_it() -> None:
    modules = "penstock, penstock_recipes.recipe.recipe"
    run_python(f"import sys, {modules}; assert 'torch' not in sys.modules")


def test_public_names_are_sorted_and_found() -> None:
    assert penstock.__all__ == sorted(penstock.__all__)
    assert [name for name in penstock.__all__ if getattr(penstock, name, None) is None] == []


def test_dir_shows_public_names_only() -> None:
    shown = [name for name in dir(penstock) if not name.startswith("__")]
    assert shown == penstock.__all__


def test_public_names_are_those_of_the_last_release_and_new_ones() -> None:
    kept, found = public_names.FILE.read_text().splitlines(), public_names.public_names()
    gone = [line for line in kept if line not in found]
    new = [line for line in found if line not in kept]
    assert gone == [], (
        f"{gone} are gone or changed, now {new}: a script of the last release may use them. Name "
        'each under "Changed" or "Removed" in CHANGELOG.md, with its replacement'
        "; then run `python -m tests.public_names`"
    )
    assert new == [], (
        f'{new} are new: name each under "Added" in CHANGELOG.md'
        "; then run `python -m tests.public_names`"
    )


def test_the_banned_word_names_nothing() -> None:
    for path in SOURCES:
        text = path.read_text()
        if BANNED not in text.replace(f".{BANNED}(", "").lower():  # but for calls of torch's own
            continue
        names = set(bound_names(text))
        assert sorted(name for name in names if BANNED in name.lower()) == [], path


def test_the_banned_word_is_found_wherever_a_name_is_given_and_left_to_torch() -> None:
    ours = (
        "import x as chunk0\n"
        "class Chunk1(chunk_used): chunk2: int\n"
        "def chunk3(chunk4, *, chunk5): self.chunk6 = chunk4\n"
        "match x:\n    case [chunk7, *chunk8]: pass\n"
        "try: pass\nexcept E as chunk9: pass\n"
    )
    theirs = "parts = torch.chunk(x, chunks=2) + x.chunk(2)"
    assert sorted(n[-1] for n in bound_names(ours) if BANNED in n.lower()) == list("0123456789")
    assert [n for n in bound_names(theirs) if BANNED in n] == []
