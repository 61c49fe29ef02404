"""What the README shows is run as a reader would run it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from servers import ServerProcess
from sklearn.datasets import load_digits

from td_datapipes import RedisTDDataset
from td_datapipes.catalog import connect, load_manifest

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, command)], cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )


@pytest.mark.heavy
def test_the_demo_reaches_its_goal_on_an_embedded_server_each_time(tmp_path: Path) -> None:
    for generation in (1, 2):
        done = run(ROOT / "examples" / "digits.py", folder=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "read and trained on 43,110 rows" in done.stdout  # 30 epochs of 1437 rows
        found = re.search(r"accuracy on 360 held-out rows: (0\.\d+|1\.0+)", done.stdout)
        assert found is not None
        assert float(found[1]) >= 0.95
        server = connect(f"embedded://{tmp_path}/demo-data#digits/train")
        assert load_manifest(server, "digits/train").generation == generation
        server.close()


def test_the_demo_fails_on_a_model_that_learned_nothing_and_leaves_its_rows_on_any_server(
    server: ServerProcess, tmp_path: Path
) -> None:
    done = run(ROOT / "examples" / "digits.py", "--url", server.url("digits"), "--epochs", "0", folder=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    with RedisTDDataset(server.url("digits/train")) as train, RedisTDDataset(server.url("digits/held-out")) as held_out:
        labels = torch.cat([train[:]["label"], held_out[:]["label"]])
        pixels = torch.cat([train[:]["image"], held_out[:]["image"]]).sum(dtype=torch.float64) * 16
    digits = load_digits()
    assert labels.bincount().tolist() == torch.as_tensor(digits.target).bincount().tolist()
    assert pixels.item() == digits.images.sum()


def test_the_code_of_the_readme_runs_as_it_stands(server: ServerProcess, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    code = blocks[0].replace("redis://localhost:6379/0#", server.url("x").removesuffix("x"))
    (tmp_path / "readme.py").write_text(code)
    done = run("readme.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert server.url("x") not in code


@pytest.mark.heavy
@pytest.mark.timeout(400)
def test_the_benchmark_of_reads_runs_on_both_servers(tmp_path: Path) -> None:
    done = run(ROOT / "benchmarks" / "read.py", "--quick", "--json", "figures.json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())["results"]
    scattered = [figure for figure in figures if figure["measure"] == "scattered"]
    assert len(scattered) == 2 * 4 * 6  # servers, shapes, contenders
    assert all(figure["median_seconds"] > 0 for figure in figures if "median_seconds" in figure)
    assert {figure["measure"] for figure in figures} == {
        *("scattered", "adjacent", "epoch", "field subset", "client memory", "import")
    }
