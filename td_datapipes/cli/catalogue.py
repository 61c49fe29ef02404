"""Commands about what is on a server: ls, inspect, gc, rm."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from td_datapipes.cli.late import LateModule, late
from td_datapipes.cli.options import AsJson, AskPassword, DatasetURL, ServerOnlyURL, add_command
from td_datapipes.cli.output import (
    duration_seconds,
    format_bytes,
    format_duration,
    print_facts,
    print_json,
    print_table,
    screen,
)
from td_datapipes.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

    from td_datapipes.catalog import connect, drop, list_names, load_manifest
    from td_datapipes.datasets import RedisTDDataset
    from td_datapipes.garbage import StagedWrite, collect_garbage, staged_writes
    from td_datapipes.integrity import ShardShare, Verification, shard_shares, verify_dataset
    from td_datapipes.manifest import Manifest
    from td_datapipes.schema import Field, dtype_name
    from td_datapipes.staged import is_abandoned, names_in_use, superseded_generations
    from td_datapipes.store_garbage import collect_stores, staged_stores
    from td_datapipes.wire.server import Server
else:
    torch = LateModule("torch")
    connect, drop, list_names, load_manifest = late(
        "td_datapipes.catalog", "connect", "drop", "list_names", "load_manifest"
    )
    RedisTDDataset = late("td_datapipes.datasets", "RedisTDDataset")
    collect_garbage, staged_writes = late("td_datapipes.garbage", "collect_garbage", "staged_writes")
    shard_shares, verify_dataset = late("td_datapipes.integrity", "shard_shares", "verify_dataset")
    dtype_name = late("td_datapipes.schema", "dtype_name")
    is_abandoned, names_in_use, superseded_generations = late(
        "td_datapipes.staged", "is_abandoned", "names_in_use", "superseded_generations"
    )
    collect_stores, staged_stores = late("td_datapipes.store_garbage", "collect_stores", "staged_stores")

__all__ = ["register"]

_SAMPLED_CHUNKS = 64
KEPT_FOR = "1h"
"""What `catalog.SUPERSEDED_SECONDS` says, which is not imported for a default."""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    add_command(app, ls, "td-datapipes ls redis://localhost:6379/0")
    add_command(app, inspect, "td-datapipes inspect redis://localhost:6379/0#digits --rows 2")
    add_command(app, gc, "td-datapipes gc redis://localhost:6379/0 --older-than 1d --dry-run")
    add_command(app, verify, "td-datapipes verify redis://localhost:6379/0#digits")
    add_command(app, rm, "td-datapipes rm redis://localhost:6379/0#old --yes")


@contextmanager
def opened(url: str, *, require_name: bool) -> Iterator[Server]:
    """The server of a URL."""
    server = connect(url, require_name=require_name)
    try:
        yield server
    finally:
        server.close()


def ls(url: ServerOnlyURL, as_json: AsJson = False, ask_password: AskPassword = False) -> None:
    """List the data sets on a server."""
    del ask_password
    with opened(url, require_name=False) as server:
        manifests = [load_manifest(server, name) for name in list_names(server)]
        address = server.address
    if as_json:
        print_json({"server": address, "datasets": [_summary(manifest) for manifest in manifests]})
        return
    if not manifests:
        screen().print(f"no data sets at {address}", markup=False)
        return
    heads = [("name", "left"), ("rows", "right"), ("size", "right"), ("row", "right"), ("fields", "right")]
    rows = [
        (
            manifest.name,
            f"{manifest.rows:,}",
            format_bytes(manifest.nbytes),
            format_bytes(manifest.nbytes / manifest.rows if manifest.rows else _row_bytes(manifest)),
            str(len(manifest.schema.fields)),
            str(manifest.generation),
            manifest.created[:10],
        )
        for manifest in manifests
    ]
    print_table([*heads, ("gen", "right"), ("written", "right")], rows)


def _row_bytes(manifest: Manifest) -> int:
    return sum(layout.stride_bytes for layout in manifest.layouts)


def _summary(manifest: Manifest) -> dict[str, Any]:
    return {
        "name": manifest.name,
        "kind": manifest.kind,
        "rows": manifest.rows,
        "bytes": manifest.nbytes,
        "row_bytes": _row_bytes(manifest),
        "fields": len(manifest.schema.fields),
        "generation": manifest.generation,
        "created": manifest.created,
        "complete": manifest.complete,
    }


def inspect(
    url: DatasetURL,
    rows: Annotated[int, typer.Option(min=0, max=100, help="How many rows to show.")] = 3,
    as_json: AsJson = False,
    ask_password: AskPassword = False,
) -> None:
    """Show a data set: what a row is, how it lies on the server, and some rows."""
    del ask_password
    with opened(url, require_name=True) as server:
        manifest = load_manifest(server, server.url.name)
        kept, staged = superseded_generations(server, manifest.name), staged_writes(server, manifest.name)
        shares = shard_shares(server, manifest)
        memory = _memory(server, manifest)
        address = server.address
    with RedisTDDataset(url, prefetch_bytes=0) as dataset:
        shown = dataset[: min(rows, len(dataset))]
    fields = list(manifest.schema.fields.values())
    if as_json:
        values = [{".".join(f.key): _plain(_value(shown, f, row)) for f in fields} for row in range(len(shown))]
        described = [field.to_json() for field in fields]
        more = {"server": address, "chunks": _num_chunks(manifest), "shards": len(manifest.tags), **memory}
        more |= {"earlier_generations": kept, "staged": [_staged(write) for write in staged]}
        more |= {"shares": [asdict(share) for share in shares]}
        print_json({**_summary(manifest), **more, "schema": described, "first_rows": values})
        return
    print_facts(_facts(manifest, address, memory, kept, staged))
    if any(share.node for share in shares):
        _print_shares(shares)
    heads = [("field", "left"), ("dtype", "left"), ("shape", "left"), ("bytes", "right"), ("at", "right")]
    cells = [(".".join(f.key), *_type_and_shape(f), _bytes_text(f, manifest), f"{f.offset_bytes:,}") for f in fields]
    screen().print()
    print_table(heads, cells)
    if len(shown) and fields:
        screen().print()
        heads = [("row", "right"), *((".".join(field.key), "left") for field in fields[:_COLUMNS_SHOWN])]
        print_table(heads, [_row(row, fields, shown) for row in range(len(shown))])
        if len(fields) > _COLUMNS_SHOWN:
            screen().print(f"and {len(fields) - _COLUMNS_SHOWN} more fields")


_COLUMNS_SHOWN = 6
_TEXT_SHOWN = 30
"""Characters of a string or a JSON value."""


def _row(row: int, fields: list[Field], shown: Any) -> list[str]:
    return [str(row), *(_brief(_value(shown, field, row)) for field in fields[:_COLUMNS_SHOWN])]


def _type_and_shape(field: Field) -> tuple[str, str]:
    varying = field.varying
    if varying is None:
        return dtype_name(field.dtype), str(list(field.shape))
    if varying.kind != "tensor":
        return varying.kind, ""
    return dtype_name(varying.dtype), f"[{', '.join(map(str, ('*', *varying.shape)))}]"


def _bytes_text(field: Field, manifest: Manifest) -> str:
    """Of one row; those of variable length have some in the record and, on average, so many elsewhere."""
    if field.varying is None:
        return f"{field.nbytes:,}"
    heap = next(heap for heap in manifest.heaps if heap.key == field.key)
    return f"{field.nbytes:,} + ~{-(-heap.nbytes // max(manifest.rows, 1)):,}"


def _value(shown: Any, field: Field, row: int) -> Any:
    values = shown.get(field.key)
    if field.varying is not None and field.varying.kind != "tensor":
        return values.tolist()[row]
    return values[row]


def _brief(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        text = repr(value)
        return text if len(text) <= _TEXT_SHOWN else text[: _TEXT_SHOWN - 1] + "…"
    flat = value.reshape(-1)
    texts = [_number(item) for item in flat[:3]]
    if not value.ndim:
        return texts[0]
    return "[" + " ".join(texts) + (" …" if flat.numel() > 3 else "") + "]"


def _number(item: torch.Tensor) -> str:
    if item.dtype.is_complex:
        return str(complex(item.to(torch.complex128)))
    return f"{float(item.to(torch.float64)):.4g}" if item.dtype.is_floating_point else str(item.item())


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if not isinstance(value, torch.Tensor):
        return value
    if value.dtype.is_complex:
        return torch.view_as_real(value.to(torch.complex128)).tolist()
    return (value.to(torch.float64) if value.dtype.is_floating_point else value).tolist()


def _num_chunks(manifest: Manifest) -> int:
    return sum(layout.num_chunks(manifest.rows) for layout in manifest.layouts)


def _facts(
    manifest: Manifest, address: str, memory: dict[str, Any], kept: list[dict[str, Any]], staged: list[StagedWrite]
) -> list[tuple[str, str]]:
    chunks, state = _num_chunks(manifest), ", complete" if manifest.complete else ""
    facts = [
        ("data set", manifest.name),
        ("server", address),
        ("rows", f"{manifest.rows:,} of {format_bytes(_row_bytes(manifest))}: {format_bytes(manifest.nbytes)}"),
        ("kind", f"{manifest.kind}, generation {manifest.generation} of {manifest.created}{state}"),
        ("chunks", f"{chunks:,} in {len(manifest.tags)} shard{'s' * (len(manifest.tags) != 1)}"),
    ]
    if memory["memory_bytes"] is not None:
        facts.append(("memory", _memory_text(memory)))
    for old in kept:
        age = format_duration(old["superseded_seconds"])
        facts.append(("earlier", f"generation {old['generation']}, {old['rows']:,} rows, superseded {age} ago; see gc"))
    for write in staged:
        age = format_duration(time.time() - write.started)
        facts.append(("unfinished", f"a write of {age} ago" + (", interrupted; see gc" if is_abandoned(write) else "")))
    return facts


def _print_shares(shares: Sequence[ShardShare]) -> None:
    """Which node of a cluster has how much of it."""
    screen().print()
    heads = [("shard", "left"), ("slot", "right"), ("node", "left"), ("chunks", "right"), ("size", "right")]
    rows = [(s.tag, str(s.slot), s.node or "nobody", f"{s.chunks:,}", format_bytes(s.nbytes)) for s in shares]
    print_table(heads, rows)


def _memory_text(memory: dict[str, Any]) -> str:
    text = f"about {format_bytes(memory['memory_bytes'])} on the server"
    if memory["server_used_bytes"]:
        text += f", which uses {format_bytes(memory['server_used_bytes'])}"
        limit = memory["server_max_bytes"]
        text += f" of {format_bytes(limit)}" if limit else " (no maxmemory)"
    return text


def _staged(write: StagedWrite) -> dict[str, Any]:
    known = {"id": write.id, "host": write.host, "pid": write.pid, "age_seconds": time.time() - write.started}
    return {**known, "abandoned": is_abandoned(write)}


def _memory(server: Server, manifest: Manifest) -> dict[str, Any]:
    """What it takes on the server, from some of its chunks; None where the user may not ask."""
    keys = []
    for group, layout in enumerate(manifest.layouts):
        chunks = layout.num_chunks(manifest.rows)
        keys += [manifest.chunk_key(group, chunk) for chunk in range(0, chunks, max(1, chunks // _SAMPLED_CHUNKS))]

    def command(client: Any) -> dict[str, Any]:
        found: dict[str, Any] = {"memory_bytes": None, "server_used_bytes": None, "server_max_bytes": None}
        try:
            sizes = [client.memory_usage(key) or 0 for key in keys]
            found["memory_bytes"] = round(sum(sizes) / len(sizes) * _num_chunks(manifest)) if sizes else 0
            info = client.info("memory")
            found |= {"server_used_bytes": info.get("used_memory"), "server_max_bytes": info.get("maxmemory")}
        except Exception as error:
            if "NOPERM" not in str(error) and "permissions" not in str(error):
                raise
        return found

    return server.call("asking for memory", command)


def gc(
    url: ServerOnlyURL,
    older_than: Annotated[
        str, typer.Option(metavar="TIME", help="Keep what is younger than this: 90s, 30m, 1.5h, 2d.")
    ] = KEPT_FOR,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    as_json: AsJson = False,
    ask_password: AskPassword = False,
) -> None:
    """Remove superseded generations, and what interrupted writes left."""
    del ask_password
    seconds = duration_seconds(older_than)
    with opened(url, require_name=False) as server:
        generations: list[dict[str, Any]] = []
        writes: list[tuple[str, StagedWrite]] = []
        for name in names_in_use(server):
            old = [g for g in superseded_generations(server, name) if g["superseded_seconds"] >= seconds]
            generations += [{"name": name, **generation} for generation in old]
            writes += [(name, write) for write in staged_writes(server, name) if write.interrupted(seconds)]
            if not dry_run:
                collect_garbage(server, name, seconds)
        writes += [(name, write) for name, write in staged_stores(server) if write.interrupted(seconds)]
        if not dry_run:
            collect_stores(server, seconds)
    if as_json:
        staged = [{"name": name, **_staged(write)} for name, write in writes]
        print_json({"dry_run": dry_run, "generations": generations, "staged": staged})
        return
    console, verb = screen(), "would remove" if dry_run else "removed"
    for item in generations:
        text = f"generation {item['generation']} of {item['name']} ({item['rows']:,} rows)"
        console.print(f"{verb} {text}", markup=False)
    for name, write in writes:
        console.print(
            f"{verb} what a write of {name} left ({format_duration(time.time() - write.started)} ago)", markup=False
        )
    if not generations and not writes:
        console.print(f"nothing to remove that is older than {format_duration(seconds)}", markup=False)


def verify(
    url: DatasetURL,
    progress: Annotated[
        bool | None, typer.Option("--progress/--no-progress", help="Show a progress bar. By default on a terminal.")
    ] = None,
    as_json: AsJson = False,
    ask_password: AskPassword = False,
) -> None:
    """Read every chunk of a data set and compare it with its checksum. Exit code 7 where one is bad."""
    del ask_password
    found = verify_dataset(url, progress=progress)
    if as_json:
        facts = {"name": found.manifest.name, "chunks": found.chunks, "bytes": found.nbytes, "compared": found.compared}
        print_json({**facts, "bad": [asdict(bad) for bad in found.bad]})
    else:
        _print_verification(found)
    if found.bad:
        raise typer.Exit(7)


def _print_verification(found: Verification) -> None:
    for bad in found.bad:
        screen().print(f"{bad.problem}: chunk {bad.key}, {bad.holds}", markup=False, soft_wrap=True)
    how = "compared with checksums" if found.compared else "there and of the right length; it has no checksums"
    what = f"{found.manifest.name}: {found.chunks:,} chunks, {format_bytes(found.nbytes)}"
    screen().print(f"{what} {how}, {len(found.bad):,} of them bad", markup=False)


def rm(
    url: DatasetURL,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
    ask_password: AskPassword = False,
) -> None:
    """Remove a data set with all its generations."""
    del ask_password
    with opened(url, require_name=True) as server:
        manifest = load_manifest(server, server.url.name)
        if not yes:
            what = f"{manifest.name}: {manifest.rows:,} rows, {format_bytes(manifest.nbytes)}"
            if not sys.stdin.isatty():
                raise ConfigurationError(f"nobody can be asked whether to remove {what}; say so with --yes")
            if not typer.confirm(f"remove {what}?", err=True):
                raise typer.Exit(1)
        drop(server, manifest.name)
    if as_json:
        print_json({"removed": _summary(manifest)})
    else:
        screen().print(f"removed {manifest.name} ({manifest.rows:,} rows)", markup=False)
