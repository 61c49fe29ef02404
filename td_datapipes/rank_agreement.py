"""Whether the ranks of a mesh mean the same batch: what each holds, compared, and what differs in words."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import IterableDataset

from td_datapipes.errors import ConfigurationError, TDDatapipesError
from td_datapipes.mesh import MeshSpec
from td_datapipes.rank_exchange import all_gather_over_mesh, all_gather_texts
from td_datapipes.schema import Key, format_key

__all__ = [
    "RankReport",
    "describe_cursor",
    "digest_contents",
    "digest_tensor",
    "disagreement",
    "ranks_of",
    "require_agreement",
]

_MASK = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one rank says of a batch.

    Attributes:
        rank: who says it.
        error: why the rank cannot place its batch; empty where it can.
        fields: a line for each field: dtype, global row shape, placements.
        num_rows: rows of the global batch, as the rank sees it.
        held_rows: rows the rank holds itself.
        cursor: where its sampler stands; empty where it has none.
        contents: for each mesh axis, a digest of what ranks that differ only along that axis must hold alike.
    """

    rank: int
    error: str = ""
    fields: tuple[str, ...] = ()
    num_rows: int = 0
    held_rows: int = 0
    cursor: str = ""
    contents: tuple[int, ...] = ()

    def to_json(self) -> str:
        """As it travels."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankReport:
        """The inverse of `to_json`."""
        values = json.loads(text)
        return cls(**{**values, "fields": tuple(values["fields"]), "contents": tuple(values["contents"])})


def require_agreement(mesh: DeviceMesh, report: RankReport, timeout_seconds: float) -> None:
    """Compare the reports of all ranks of a mesh: one all_gather of a few integers, a second one only if they differ.

    Raises:
        ConfigurationError: they differ, or a rank reports an error: the same message on every rank, naming both sides.
        PeerTimeoutError: a rank did not come in time.
    """
    deadline, doing = time.monotonic() + timeout_seconds, "comparing the batch over the ranks"
    text = report.to_json()
    contents = [*report.contents, *[0] * (mesh.ndim - len(report.contents))]
    facts = [
        *(report.rank, len(text.encode()), bool(report.error), report.num_rows),
        *(_digest(report.cursor.encode()), _digest("\n".join(report.fields).encode())),
    ]
    table = all_gather_over_mesh(mesh, torch.tensor([*facts, *contents], dtype=torch.int64), deadline, doing)
    spec, rows = MeshSpec.of(mesh), {int(row[0]): row[2:] for row in table}
    plain = 4
    if (
        not table[:, 2].any()
        and all(torch.equal(row[:plain], rows[report.rank][:plain]) for row in rows.values())
        and not any(_content_differences(spec, {rank: row[plain:].tolist() for rank, row in rows.items()}))
    ):
        return
    texts = all_gather_texts(mesh, text, int(table[:, 1].max()), deadline, doing)
    reports = sorted(map(RankReport.from_json, texts), key=lambda one: one.rank)
    raise ConfigurationError(disagreement(spec, reports) or "the ranks disagree about the batch")


def disagreement(mesh: MeshSpec, reports: Sequence[RankReport]) -> str:
    """What is wrong, naming both sides; empty where all is well. Pure.

    Args:
        mesh: of the ranks.
        reports: one a rank, by ascending rank.
    """
    first = reports[0]
    for other in reports:
        if other.error:
            return f"{_name(mesh, other)} cannot place its batch: {other.error}"
    for other in reports[1:]:
        sides = _name(mesh, first), _name(mesh, other)
        if first.fields != other.fields:
            mine, theirs = _first_difference(first.fields, other.fields)
            return f"the ranks hold different fields: {sides[0]} has {mine}, {sides[1]} has {theirs}"
        if first.cursor != other.cursor:
            return (
                f"the ranks' samplers stand at different places: {sides[0]} at {first.cursor}, {sides[1]} at "
                f"{other.cursor}. Give them the same seed and epoch, and load the same state"
            )
        if first.num_rows != other.num_rows:
            return (
                f"the ranks hold different numbers of rows: {sides[0]} {first.held_rows} of a global batch of "
                f"{first.num_rows}, {sides[1]} {other.held_rows} of {other.num_rows}"
            )
    for one, another, axis in _content_differences(mesh, {report.rank: report.contents for report in reports}):
        by_rank = {report.rank: report for report in reports}
        axis_name = mesh.axis_names[axis] if mesh.axis_names else axis
        return (
            f"{_name(mesh, by_rank[one])} and {_name(mesh, by_rank[another])} differ only along the mesh axis "
            f"{axis_name!r} and have to hold the same rows, but theirs differ: their samplers disagree on the global "
            f"batch, or were given rank and world_size of other axes than the data's"
        )
    return ""


def _content_differences(mesh: MeshSpec, contents: Mapping[int, Sequence[int]]) -> Iterable[tuple[int, int, int]]:
    """(rank, rank, axis) of pairs along an axis whose digests for it differ."""
    at = {coordinate: rank for rank, coordinate in mesh.coordinates()}
    for rank, coordinate in mesh.coordinates():
        for axis, index in enumerate(coordinate):
            if index:
                head = at[(*coordinate[:axis], 0, *coordinate[axis + 1 :])]
                if list(contents[head])[axis : axis + 1] != list(contents[rank])[axis : axis + 1]:
                    yield head, rank, axis


def _first_difference(mine: Sequence[str], theirs: Sequence[str]) -> tuple[str, str]:
    nothing = "no such field"
    for line in mine:
        if line not in theirs:
            same = [other for other in theirs if other.partition(": ")[0] == line.partition(": ")[0]]
            return line, same[0] if same else nothing
    for line in theirs:
        if line not in mine:
            return nothing, line
    return ", ".join(mine), f"the same in the order {', '.join(theirs)}"


def _name(mesh: MeshSpec, report: RankReport) -> str:
    names = mesh.axis_names or tuple(f"axis {axis}" for axis in range(mesh.ndim))
    at = ", ".join(f"{name}={index}" for name, index in zip(names, mesh.coordinate(report.rank), strict=True))
    return f"rank {report.rank} ({at})"


def digest_tensor(tensor: torch.Tensor) -> bytes:
    """A short name for a tensor's bits, dtype and shape."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    flat = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy()
    head = f"{plain.dtype}{tuple(plain.shape)}".encode()
    return hashlib.blake2b(flat.data, digest_size=16, key=head[:64]).digest()


def digest_contents(digests: Mapping[Key, bytes], keys: Iterable[Key]) -> int:
    """One integer for the contents of some fields."""
    return _digest(b"".join(format_key(key).encode() + digests[key] for key in sorted(keys)))


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") & _MASK


def ranks_of(sampler: object) -> tuple[int, int] | None:
    """(rank, world size) that a sampler deals for: (0, 1) for one that knows no ranks, and so deals all rows to each.

    Args:
        sampler: a batch sampler, a sampler, or a loader with one; None, and a loader of an iterable data set, which
            shares rows out in ways of its own, say nothing.
    """
    if sampler is None or isinstance(getattr(sampler, "dataset", None), IterableDataset):
        return None
    for part in _parts(sampler):
        rank, size = getattr(part, "rank", None), getattr(part, "world_size", getattr(part, "num_replicas", None))
        if isinstance(rank, int) and isinstance(size, int):
            return rank, size
    return 0, 1


def describe_cursor(sampler: object) -> str:
    """Where a sampler stands, alike on all ranks that go through the same order; empty where it does not say."""
    for part in _parts(sampler):
        if callable(cursor := getattr(part, "cursor", None)):
            try:
                return json.dumps(cursor().to_dict())
            except TDDatapipesError:  # an inner sampler without a cursor: perhaps it says something itself
                continue
        if hasattr(part, "num_replicas"):
            named: dict[str, Any] = {name: getattr(part, name, None) for name in ("seed", "epoch", "num_replicas")}
            return json.dumps({name: value for name, value in named.items() if isinstance(value, int)})
    return ""


def _parts(sampler: object) -> Iterable[object]:
    """A sampler and what it wraps, from the outside in."""
    seen: list[object] = []
    part: object | None = sampler
    while part is not None and not any(part is one for one in seen):
        seen.append(part)
        inner = getattr(part, "batch_sampler", None)
        part = getattr(part, "sampler", None) if inner is None else inner
    return seen
