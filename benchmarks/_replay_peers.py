"""Other replay buffers, each in a process and an environment of its own; `replay.py` runs this, see README.md.

    PYTHON benchmarks/_replay_peers.py memmap|store|reverb|reverb-inside SMALL|LARGE ROWS [HOST PORT]

Reverb's server runs in a process of its own, or inside the learner's, where Reverb reads its tables without gRPC and
nobody else's server can be. Prints ">ready" once it holds its rows, then answers each line "MEASURE BATCHES" with the
seconds that a batch takes, or "none" where it has no such thing. Nothing here knows of td_datapipes.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

BATCH = 256
WARM_UP = 10
"""Batches before those that are counted: what was read ahead while others had their turn is not."""
PIXELS = (4, 84, 84)


def arrays(shape: str, rows: int) -> dict[str, Any]:
    """Rows of 276 bytes, or of 28 KB."""
    dice = np.random.default_rng(0)
    if shape == "small":
        widths = {"observation": 32, "next_observation": 32, "action": 4, "reward": 1}
        return {name: dice.random((rows, width), dtype=np.float32) for name, width in widths.items()}
    return {
        "pixels": dice.integers(0, 255, (rows, *PIXELS), dtype=np.uint8),
        "action": dice.integers(0, 4, rows),
        "reward": dice.random(rows, dtype=np.float32),
        "done": np.zeros(rows, dtype=np.bool_),
    }


def torchrl_peer(kind: str, shape: str, rows: int, where: list[str]) -> dict[str, Callable[[], Any]]:
    """torchrl's storage in mapped files of a memory disk, or its storage on the same server."""
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer
    from torchrl.data.replay_buffers.storages import StoreStorage

    torch.set_num_threads(1)
    if kind == "memmap":
        storage: Any = LazyMemmapStorage(rows, scratch_dir=tempfile.mkdtemp(dir="/dev/shm"))
    else:
        storage = StoreStorage(rows, host=where[0], port=int(where[1]))
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=BATCH, prefetch=2)
    source = {name: torch.from_numpy(value) for name, value in arrays(shape, BATCH).items()}
    batch = TensorDict(source, [BATCH])
    for _ in range(rows // BATCH):
        buffer.extend(batch.clone())
    return {"uniform": buffer.sample, "extend": lambda: buffer.extend(batch.clone())}


def reverb_server(shape: str, rows: int) -> Any:
    """A running server with a table for each way of drawing."""
    import reverb
    import tensorflow as tf

    source = arrays(shape, BATCH)
    signature = {
        name: tf.TensorSpec([1, *value.shape[1:]], tf.as_dtype(value.dtype), name=name)
        for name, value in source.items()
    }
    selectors = {"uniform": reverb.selectors.Uniform(), "prioritized": reverb.selectors.Prioritized(0.6)}
    tables = [
        reverb.Table(name, sampler, reverb.selectors.Fifo(), rows, reverb.rate_limiters.MinSize(1), signature=signature)
        for name, sampler in selectors.items()
    ]
    return reverb.Server(tables=tables, port=None)


def serve(shape: str, rows: int, told: Any) -> None:
    """Run a server until the process is ended, and say at which port."""
    server = reverb_server(shape, rows)
    told.send(server.port)
    server.wait()


def reverb_peer(shape: str, rows: int, *, inside: bool) -> dict[str, Callable[[], Any]]:
    """Reverb's TrajectoryDataset, uniform and prioritized, and its writer of single items."""
    import reverb

    if inside:
        server = reverb_server(shape, rows)
        port = server.port
    else:
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe()
        server = context.Process(target=serve, args=(shape, rows, theirs), daemon=True)
        server.start()
        port = mine.recv()
    client = reverb.Client(f"localhost:{port}")
    source = arrays(shape, BATCH)
    dice = np.random.default_rng(1)

    def extend(names: tuple[str, ...] = ("uniform",)) -> None:
        with client.trajectory_writer(num_keep_alive_refs=1) as writer:
            for row in range(BATCH):
                writer.append({name: value[row] for name, value in source.items()})
                for name in names:
                    item = {field: writer.history[field][-1:] for field in source}
                    writer.create_item(table=name, priority=dice.random() + 0.01, trajectory=item)
            writer.flush()

    for _ in range(rows // BATCH):
        extend(("uniform", "prioritized"))
    measures: dict[str, Callable[[], Any]] = {"extend": extend}
    for name in ("uniform", "prioritized"):
        dataset = reverb.TrajectoryDataset.from_table_signature(
            server_address=f"localhost:{port}", table=name, max_in_flight_samples_per_worker=2 * BATCH
        )
        batches = iter(dataset.batch(BATCH).prefetch(2).as_numpy_iterator())
        measures[name] = lambda batches=batches: next(batches)
    measures["keep"] = lambda: server  # it ends with its last reference
    return measures


def answer(text: str) -> None:
    """Told apart from what libraries print by its first character."""
    print(f">{text}", flush=True)


def main() -> None:
    """Answer lines until there are no more."""
    kind, shape, rows, *where = sys.argv[1:]
    if kind.startswith("reverb"):
        peer = reverb_peer(shape, int(rows), inside=kind == "reverb-inside")
    else:
        peer = torchrl_peer(kind, shape, int(rows), where)
    answer("ready")
    for line in sys.stdin:
        name, number = line.split()
        if name not in peer:
            answer("none")
            continue
        for _ in range(WARM_UP):
            peer[name]()
        began = time.perf_counter()
        for _ in range(int(number)):
            peer[name]()
        answer(repr((time.perf_counter() - began) / int(number)))


if __name__ == "__main__":
    main()
