"""Train a small transformer on a 2 x 2 mesh, FSDP2 over one axis and tensor parallel over the other, out of Redis.

    python examples/train_fsdp_tp.py                                        # an embedded server, 4 CPU processes
    python examples/train_fsdp_tp.py --url redis://localhost:6379/0#text    # any Redis or Valkey
    torchrun --nproc-per-node 4 examples/train_fsdp_tp.py --url redis://host:6379/0#text

Each rank reads only the rows that it trains on, and ranks along the tensor-parallel axis read the same ones. At the
end one process trains the same model on the same global batches; exits with 1 where its losses are not the same to
rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tensordict import TensorDict
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from td_datapipes import DTensorCollate, Placement, RedisTDDataset, write_dataset
from td_datapipes.samplers import BlockShuffleBatchSampler

MESH = (2, 2)
AXES = ("dp", "tp")
VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS = 64, 32, 32, 4, 2
ROWS, GLOBAL_BATCH = 512, 16
TOLERANCE = 1e-5


def write_text(url: str) -> None:
    """Sequences that can be learnt: each token follows from the one before, now and then by chance."""
    generator = torch.Generator().manual_seed(0)
    following = torch.randperm(VOCABULARY, generator=generator)
    tokens = torch.randint(0, VOCABULARY, (ROWS, CONTEXT + 1), generator=generator)
    kept = torch.rand(ROWS, CONTEXT, generator=generator) < 0.9
    for place in range(CONTEXT):
        after = following[tokens[:, place]]
        tokens[:, place + 1] = torch.where(kept[:, place], after, tokens[:, place + 1])
    rows = TensorDict({"tokens": tokens[:, :-1].short(), "next": tokens[:, 1:].short()}, batch_size=[ROWS])
    write_dataset(rows, url, overwrite=True)


class Block(nn.Module):
    """Attention and a perceptron. Heads are counted by the projections' width, which tensor parallel divides."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, context, width] -> the same."""
        normed = self.norm_1(x)
        heads = [
            project(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        ]
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))


class Transformer(nn.Module):
    """Predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[rows, context] -> logits [rows, context, vocabulary]."""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parallelise(model: Transformer, mesh: DeviceMesh) -> None:
    """Tensor parallel within each block, then FSDP over the data axis."""
    plan = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
    plan |= {name: RowwiseParallel() for name in ("out", "down")}
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def loss_of(model: nn.Module, tokens: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Cross-entropy over all tokens given."""
    return nn.functional.cross_entropy(model(tokens.long()).flatten(0, 1), following.long().flatten())


def train_sharded(url: str, steps: int) -> list[float]:
    """This rank's part of the run; every rank returns the losses of the global batches."""
    mesh = init_device_mesh("cpu", MESH, mesh_dim_names=AXES)
    torch.manual_seed(0)
    model = Transformer()
    parallelise(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses: list[float] = []
    # Shard(0) over dp, Replicate() over tp: that is the default.
    with RedisTDDataset(url, placement=Placement(mesh, data_axes="dp")) as dataset:
        rank, size = dataset.data_rank, dataset.data_world_size
        sampler = BlockShuffleBatchSampler(
            dataset, GLOBAL_BATCH // size, seed=0, drop_last=True, rank=rank, world_size=size
        )
        collate = DTensorCollate(mesh, dataset=dataset, sampler=sampler)
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)
        while len(losses) < steps:
            for batch in loader:
                optimizer.zero_grad()
                loss = loss_of(model, batch["tokens"].to_local(), batch["next"].to_local())
                loss.backward()
                optimizer.step()
                # FSDP averages gradients over dp, so the global batch's loss is the mean over dp too.
                total = loss.detach().clone()
                dist.all_reduce(total, group=mesh.get_group("dp"))
                losses.append(total.item() / size)
                if len(losses) == steps:
                    break
    return losses


def train_alone(url: str, steps: int) -> list[float]:
    """The same model on the same global batches in one process."""
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses: list[float] = []
    with RedisTDDataset(url) as dataset:
        sampler = BlockShuffleBatchSampler(dataset, GLOBAL_BATCH, seed=0, drop_last=True, rank=0, world_size=1)
        while len(losses) < steps:
            for batch in DataLoader(dataset, batch_sampler=sampler):
                optimizer.zero_grad()
                loss = loss_of(model, batch["tokens"], batch["next"])
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                if len(losses) == steps:
                    break
    return losses


def run_rank(rank: int, url: str, steps: int, folder: str) -> None:
    """One of the processes that this script starts by itself."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=MESH[0] * MESH[1])
    losses = train_sharded(url, steps)
    if rank == 0:
        (Path(folder) / "losses.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


def compare(sharded: list[float], alone: list[float]) -> int:
    """Print both runs; 1 where they differ by more than rounding."""
    for step, (one, other) in enumerate(zip(sharded, alone, strict=True)):
        if step % max(len(alone) // 10, 1) == 0 or step == len(alone) - 1:
            print(f"step {step:4}: loss {one:.6f} on the mesh, {other:.6f} in one process")
    largest = max(abs(one - other) for one, other in zip(sharded, alone, strict=True))
    print(f"largest difference {largest:.1e} (allowed: {TOLERANCE})")
    return int(largest > TOLERANCE)


def main() -> int:
    """Write the data, train on the mesh and in one process, compare."""
    here = Path("demo-data").resolve().as_uri().replace("file:", "embedded:", 1)
    parser = argparse.ArgumentParser(description="FSDP2 x tensor parallel, straight out of Redis or Valkey")
    parser.add_argument("--url", default=f"{here}#text", help="server and name (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:  # under torchrun
        dist.init_process_group("gloo")
        first = dist.get_rank() == 0
        if first:
            write_text(options.url)
        dist.barrier()
        losses = train_sharded(options.url, options.steps)
        code = compare(losses, train_alone(options.url, options.steps)) if first else 0
        dist.barrier()
        dist.destroy_process_group()
        return code
    write_text(options.url)
    with RedisTDDataset(options.url), tempfile.TemporaryDirectory() as folder:  # holds an embedded server meanwhile
        # From a fork server, so that torch is imported once and not by each of them.
        arguments = (options.url, options.steps, folder)
        mp.start_processes(run_rank, arguments, nprocs=MESH[0] * MESH[1], start_method="forkserver")
        sharded = json.loads((Path(folder) / "losses.json").read_text())
        return compare(sharded, train_alone(options.url, options.steps))


if __name__ == "__main__":
    sys.exit(main())
