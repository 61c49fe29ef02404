"""Two loader ranks read out of Redis and feed two trainer ranks, which train with FSDP2 on CPU.

    python examples/loader_ranks.py                                        # an embedded server, 4 CPU processes
    python examples/loader_ranks.py --url redis://localhost:6379/0#points  # any Redis or Valkey
    torchrun --nproc-per-node 4 examples/loader_ranks.py --url redis://host:6379/0#points

The trainers hold no connection to the server. At the end they train the same model once more, and read for themselves;
exits with 1 where the losses are not the same, bit for bit.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tensordict import TensorDict
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from td_datapipes import DTensorCollate, Placement, RedisTDDataset, ShardReceiver, ShardSender, write_dataset
from td_datapipes.samplers import BlockShuffleBatchSampler

LOADERS, TRAINERS = (0, 1), (2, 3)
FEATURES, WIDTH, CLASSES = 32, 64, 8
ROWS, GLOBAL_BATCH = 2048, 64


def write_points(url: str) -> None:
    """Points around one centre for each class."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(CLASSES, FEATURES, generator=generator)
    label = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    point = centres[label] + torch.randn(ROWS, FEATURES, generator=generator)
    write_dataset(TensorDict({"point": point, "label": label.short()}, batch_size=[ROWS]), url, overwrite=True)


def make_loader(url: str, mesh: DeviceMesh) -> DataLoader:
    """This rank's rows of each global batch, as DTensors sharded by rows over the mesh."""
    dataset = RedisTDDataset(url, placement=Placement(mesh))
    rank, size = dataset.data_rank, dataset.data_world_size
    sampler = BlockShuffleBatchSampler(
        dataset, GLOBAL_BATCH // size, seed=0, block_rows=64, drop_last=True, rank=rank, world_size=size
    )
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=DTensorCollate(mesh, dataset=dataset, sampler=sampler))


def train(batches: Iterable[TensorDict], mesh: DeviceMesh, num_epochs: int) -> list[float]:
    """Two layers over the trainers' mesh; returns the loss of each step of this rank's rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.GELU(), nn.Linear(WIDTH, CLASSES))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(num_epochs):
        for batch in batches:
            optimizer.zero_grad()
            label = batch["label"].to_local().long()
            loss = nn.functional.cross_entropy(model(batch["point"].to_local()), label)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def run(url: str, num_epochs: int) -> bool:
    """What each of the four ranks does; whether its losses are the same both times."""
    loaders, trainers = (DeviceMesh("cpu", torch.tensor(ranks)) for ranks in (LOADERS, TRAINERS))
    if dist.get_rank() in LOADERS:
        ShardSender(loaders, trainers).run(make_loader(url, loaders), num_epochs=num_epochs)
        return True
    with ShardReceiver(loaders, trainers) as receiver:
        fed = train(receiver, trainers, num_epochs)
    alone = train(make_loader(url, trainers), trainers, num_epochs)
    if dist.get_rank() == TRAINERS[0]:
        for step in range(0, len(alone), max(len(alone) // 8, 1)):
            print(f"step {step:4}: loss {fed[step]:.6f} fed by loader ranks, {alone[step]:.6f} without them")
        print(f"{len(fed)} steps, the last loss is {fed[-1]:.6f}; the same bit for bit: {fed == alone}")
    return fed == alone


def run_rank(rank: int, url: str, num_epochs: int, rendezvous: str) -> None:
    """One of the processes that this script starts by itself."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=len(LOADERS + TRAINERS))
    same = run(url, num_epochs)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(int(not same))


def main() -> int:
    """Write the data, train twice, compare."""
    here = Path("demo-data").resolve().as_uri().replace("file:", "embedded:", 1)
    parser = argparse.ArgumentParser(description="loader ranks feed trainer ranks, out of Redis or Valkey")
    parser.add_argument("--url", default=f"{here}#points", help="server and name (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:  # under torchrun
        dist.init_process_group("gloo")
        if dist.get_rank() == 0:
            write_points(options.url)
        dist.barrier()
        same = run(options.url, options.epochs)
        dist.barrier()
        dist.destroy_process_group()
        return int(not same)
    write_points(options.url)
    with RedisTDDataset(options.url), tempfile.TemporaryDirectory() as folder:  # holds an embedded server meanwhile
        arguments = (options.url, options.epochs, f"{folder}/rendezvous")
        # From a fork server, so that torch is imported once and not by each of them.
        try:
            mp.start_processes(run_rank, arguments, nprocs=len(LOADERS + TRAINERS), start_method="forkserver")
        except mp.ProcessExitedException as error:
            return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
