"""Other loaders of shuffled rows, in an environment of their own: MosaicML streaming and LitData, from local files.

`loader.py` runs this with the python given by ``--peers-python``; see README.md. It writes the same rows for each peer
that is installed, prints their names as a line of JSON, and then answers each line "NAME NUM_WORKERS" with the seconds
that an epoch takes, until "end 0". Nothing here knows of td_datapipes.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("LITDATA_DISABLE_VERSION_CHECK", "1")

import numpy as np
import torch
from torch.utils.data import DataLoader

PIXELS = (4, 84, 84)


def stand_in_for_torchvision() -> None:
    """Streaming imports it for data sets that are not used here; torchvision for CUDA does not load beside torch's
    build without it."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        for name in (
            "torchvision",
            "torchvision.datasets",
            "torchvision.transforms",
            "torchvision.transforms.functional",
        ):
            module = types.ModuleType(name)
            module.__path__ = []
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            module.__getattr__ = _stand_in  # type: ignore[method-assign]
            sys.modules[name] = module


def _stand_in(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


def row(number: int) -> dict[str, Any]:
    """A row of 28 KB: four frames and three scalars."""
    pixels = np.random.default_rng(number).integers(0, 255, PIXELS, dtype=np.uint8)
    return {"pixels": pixels, "action": number % 9, "reward": float(number), "done": number % 2}


class Streaming:
    """MosaicML streaming: shards of 64 MiB, its own shuffle within blocks of shards."""

    module = "streaming"

    def __init__(self, folder: Path, rows: int) -> None:
        from streaming import MDSWriter

        self.folder = folder
        columns = {"pixels": f"ndarray:uint8:{','.join(map(str, PIXELS))}", "action": "int", "reward": "float64"}
        with MDSWriter(out=str(folder), columns={**columns, "done": "int"}, size_limit=1 << 26) as writer:
            for number in range(rows):
                writer.write(row(number))

    def loader(self, batch_size: int, **options: Any) -> Any:
        from streaming import StreamingDataset

        dataset = StreamingDataset(local=str(self.folder), shuffle=True, batch_size=batch_size)
        return DataLoader(dataset, batch_size=batch_size, **options)


class LitData:
    """LitData: chunks of 64 MB, its own shuffle of chunks and of rows within them."""

    module = "litdata"

    def __init__(self, folder: Path, rows: int) -> None:
        from litdata import optimize

        self.folder = folder
        optimize(fn=row, inputs=list(range(rows)), output_dir=str(folder), chunk_bytes="64MB", num_workers=1)

    def loader(self, batch_size: int, **options: Any) -> Any:
        from litdata import StreamingDataLoader, StreamingDataset

        dataset = StreamingDataset(str(self.folder), shuffle=True)
        return StreamingDataLoader(dataset, batch_size=batch_size, **options)


PEERS: dict[str, Callable[[Path, int], Any]] = {"streaming": Streaming, "litdata": LitData}


def epoch_seconds(loader: Any, rows: int) -> float:
    """The time of one epoch.

    Raises:
        RuntimeError: it did not give all rows.
    """
    began, seen = time.perf_counter(), 0
    for batch in loader:
        seen += len(batch["pixels"])
    took = time.perf_counter() - began
    if seen != rows:
        raise RuntimeError(f"an epoch gave {seen} of {rows} rows")
    return took


def main() -> None:
    """Write, then answer requests. Standard output is for answers alone."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    options = parser.parse_args()
    answers, sys.stdout = sys.stdout, sys.stderr
    torch.set_num_threads(1)
    stand_in_for_torchvision()
    installed = [name for name, peer in PEERS.items() if importlib.util.find_spec(peer.module)]  # type: ignore[attr-defined]
    peers = {name: PEERS[name](options.folder / name, options.rows) for name in installed}
    print(json.dumps(installed), file=answers, flush=True)
    loaders: dict[str, Any] = {}
    for line in sys.stdin:
        name, num_workers = line.split()
        if name == "end":
            break
        if line not in loaders:
            more: dict[str, Any] = {"num_workers": int(num_workers)}
            if num_workers != "0":
                more |= {"persistent_workers": True, "multiprocessing_context": "fork"}
            loaders[line] = peers[name].loader(options.batch, **more)
        print(json.dumps(epoch_seconds(loaders[line], options.rows)), file=answers, flush=True)


if __name__ == "__main__":
    main()
