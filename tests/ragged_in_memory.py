"""Rows of variable length to write and to compare with, kept as plain lists: nothing of what is tested is used."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rows_in_memory import assert_same_tensor, random_tensor
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

__all__ = ["RaggedRows", "jagged", "texts"]

ALPHABET = "aé漢🙂\n\0"


def jagged(rows: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Rows ``[items, ...]`` as a jagged nested tensor; `like` is one of them, for there may be none."""
    offsets = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    values = torch.cat([like[:0], *rows])
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def texts(values: Sequence[Any]) -> NonTensorStack | NonTensorData:
    """One value a row."""
    if not values:
        return NonTensorData(None, batch_size=[0])
    return NonTensorStack(*(NonTensorData(value, batch_size=[]) for value in values), stack_dim=0)


@dataclass
class RaggedRows:
    """Rows with a number, tokens ``[n, 3]`` of int16, a nested string, bytes and JSON; some lack a string or bytes.

    Args:
        lengths: of each row's tokens; of the others they follow from it.
        seed: of their values.
    """

    lengths: Sequence[int]
    seed: int = 0
    tokens: list[torch.Tensor] = field(init=False)
    names: list[str | None] = field(init=False)
    blobs: list[bytes | None] = field(init=False)
    infos: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        generator, draw = torch.Generator().manual_seed(self.seed), random.Random(self.seed)
        self.tokens = [random_tensor((n, 3), torch.int16, generator) for n in self.lengths]
        self.names = ["".join(draw.choices(ALPHABET, k=n)) if n % 7 else None for n in self.lengths]
        self.blobs = [draw.randbytes(2 * n) if n % 5 else None for n in self.lengths]
        self.infos = [
            {"n": n, "list": [None, 1.5, "é"]} if n % 3 else draw.choice([n, None, [], {}, ["x"]]) for n in self.lengths
        ]

    def __len__(self) -> int:
        return len(self.lengths)

    def __add__(self, other: RaggedRows) -> RaggedRows:
        made = RaggedRows([])
        for name in ("lengths", "tokens", "names", "blobs", "infos"):
            setattr(made, name, [*getattr(self, name), *getattr(other, name)])
        return made

    def td(self) -> TensorDict:
        """As `write_dataset` takes it."""
        n = len(self)
        made = TensorDict({"row": torch.arange(n), "text": TensorDict(batch_size=[n])}, batch_size=[n])
        made["tokens"] = jagged(self.tokens, torch.empty(0, 3, dtype=torch.int16))
        made.set(("text", "name"), texts(self.names))
        made.set("blob", texts(self.blobs))
        made.set("info", texts(self.infos))
        return made

    def assert_equal(self, batch: TensorDictBase, rows: Sequence[int]) -> None:
        """The batch is those rows, in that order."""
        assert batch.batch_size == (len(rows),)
        assert set(batch.keys()) == {"row", "text", "tokens", "blob", "info"}
        if not rows:
            return
        found = batch.get("tokens")
        assert found.layout == torch.jagged
        assert found.offsets().tolist() == torch.tensor([0, *(self.lengths[row] for row in rows)]).cumsum(0).tolist()
        assert_same_tensor(found.values(), torch.cat([self.tokens[row] for row in rows]), "tokens")
        assert list(batch["text", "name"]) == [self.names[row] for row in rows]
        assert list(batch["blob"]) == [self.blobs[row] for row in rows]
        assert list(batch["info"]) == [self.infos[row] for row in rows]
