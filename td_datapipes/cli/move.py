"""Commands that move rows: ingest, append, convert, export."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from td_datapipes.cli.late import late
from td_datapipes.cli.options import AsJson, AskPassword, DatasetURL, add_command, parse_fill, parse_name, parse_shapes
from td_datapipes.cli.output import format_bytes, print_json, screen, shown_url
from td_datapipes.errors import ServerError
from td_datapipes.formats import EXPORT_FORMATS, FORMATS

if TYPE_CHECKING:
    from td_datapipes.conversion import convert as convert_dataset
    from td_datapipes.export import export as export_rows
    from td_datapipes.ingest import ingest as ingest_rows
    from td_datapipes.manifest import Manifest
else:
    convert_dataset = late("td_datapipes.conversion", "convert")
    export_rows = late("td_datapipes.export", "export")
    ingest_rows = late("td_datapipes.ingest", "ingest")

__all__ = ["register"]

Source = Annotated[
    list[str],
    typer.Argument(
        metavar="SRC...",
        help="A file, a directory or a pattern: Parquet, Arrow, Feather, a saved Hugging Face data set, a "
        "memory-mapped TensorDict, .npy, .npz, .safetensors.",
        show_default=False,
    ),
]
Columns = Annotated[
    list[str], typer.Option("--column", "-c", help="Read only this column; repeat for more. n.y is y of the struct n.")
]
Drop = Annotated[list[str], typer.Option("--drop", help="Leave this column out; repeat for more.")]
Filters = Annotated[
    list[str], typer.Option("--filter", help="Only rows for which this holds: 'age >= 18'; repeatable.")
]
Fill = Annotated[
    list[str], typer.Option("--fill", help="What stands for null: COLUMN=VALUE, or VALUE for all others; repeatable.")
]
Shapes = Annotated[
    list[str], typer.Option("--shape", help="Shape that all rows of a list column have: COLUMN=84x84; repeatable.")
]
Format = Annotated[
    str | None,
    typer.Option("--format", help=f"What the files are, where their names do not say: {', '.join(FORMATS)}."),
]
Progress = Annotated[
    bool | None, typer.Option("--progress/--no-progress", help="Show a progress bar. By default on a terminal.")
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    add_command(app, ingest, "td-datapipes ingest data/*.parquet redis://localhost:6379/0#train --drop comment")
    add_command(app, append, "td-datapipes append new.parquet redis://localhost:6379/0#train")
    add_command(app, convert, "td-datapipes convert redis://localhost:6379/0#a redis://localhost:6379/0#b")
    add_command(app, export, "td-datapipes export redis://localhost:6379/0#train train.parquet")


def ingest(
    source: Source,
    url: DatasetURL,
    column: Columns = [],  # noqa: B006 - typer copies it
    drop: Drop = [],  # noqa: B006
    where: Filters = [],  # noqa: B006
    fill: Fill = [],  # noqa: B006
    shape: Shapes = [],  # noqa: B006
    file_format: Format = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Publish in place of what the name stands for.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Go on where the same ingest was interrupted.")
    ] = True,
    chunk_kib: Annotated[
        int | None, typer.Option("--chunk-kib", min=1, help="Longest stretch of records in one string; 4096.")
    ] = None,
    progress: Progress = None,
    as_json: AsJson = False,
    ask_password: AskPassword = False,
) -> None:
    """Write files to a server as a new data set.

    It is published when all of it has arrived. Interrupted, it keeps what it has sent, and the same command goes on
    from there. Columns that cannot be stored and nulls without a fill are errors that name the column.
    """
    del ask_password
    began = time.monotonic()
    options = _options(column, drop, where, fill, shape, file_format)
    chunk_bytes = None if chunk_kib is None else chunk_kib << 10
    try:
        manifest = ingest_rows(
            source,
            url,
            overwrite=overwrite,
            resume=resume,
            chunk_bytes=chunk_bytes,
            progress=progress,
            **options,
        )
    except (KeyboardInterrupt, ConnectionError, TimeoutError, ServerError):
        sys.stderr.write("what has arrived is kept; the same command goes on from there\n")
        raise
    _report("published", manifest, url, time.monotonic() - began, as_json=as_json)


def append(
    source: Source,
    url: DatasetURL,
    column: Columns = [],  # noqa: B006
    drop: Drop = [],  # noqa: B006
    where: Filters = [],  # noqa: B006
    fill: Fill = [],  # noqa: B006
    shape: Shapes = [],  # noqa: B006
    file_format: Format = None,
    progress: Progress = None,
    as_json: AsJson = False,
    ask_password: AskPassword = False,
) -> None:
    """Add the rows of files to a data set, as its next generation.

    What it has is not copied, and whoever reads it reads on. The columns must be those of the data set.
    """
    del ask_password
    began = time.monotonic()
    options = _options(column, drop, where, fill, shape, file_format)
    manifest = ingest_rows(source, url, append=True, progress=progress, **options)
    _report("appended to", manifest, url, time.monotonic() - began, as_json=as_json)


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC_URL", help="What is copied: redis://host:6379/0#name.")],
    target: Annotated[str, typer.Argument(metavar="DST_URL", help="The copy: the same server or another.")],
    layout: Annotated[
        str | None, typer.Option(help="Of the copy: records or tensordict_store; by default the other one.")
    ] = None,
    field: Annotated[
        list[str], typer.Option("--field", help='Only this field; repeat for more. ["n","y"] is a nested one.')
    ] = [],  # noqa: B006
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what the name stands for.")] = False,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read values that TensorDictStore pickled, from a server you trust.")
    ] = False,
    progress: Progress = None,
    as_json: AsJson = False,
    ask_password: AskPassword = False,
) -> None:
    """Copy a data set between records and what TensorDictStore writes, verified before it is published."""
    del ask_password
    began = time.monotonic()
    copy = convert_dataset(
        source,
        target,
        layout=cast(Any, layout),
        fields=[parse_name(name) for name in field] or None,
        overwrite=overwrite,
        allow_pickle=allow_pickle,
        progress=progress,
    )
    seconds = time.monotonic() - began
    if as_json:
        print_json({"name": copy.name, "rows": copy.rows, "seconds": round(seconds, 3)})
    else:
        screen().print(f"copied {copy.rows:,} rows to {copy.name} in {seconds:.1f} s", markup=False)


def _options(
    column: list[str], drop: list[str], where: list[str], fill: list[str], shape: list[str], file_format: str | None
) -> dict[str, Any]:
    fills = parse_fill(fill)
    return {
        "columns": [parse_name(name) for name in column] or None,
        "drop": [parse_name(name) for name in drop],
        "filters": where,
        "fill": fills or None,
        "shapes": parse_shapes(shape),
        "file_format": file_format,
    }


def _report(verb: str, manifest: Manifest, url: str, seconds: float, *, as_json: bool) -> None:
    facts = {
        "name": manifest.name,
        "rows": manifest.rows,
        "bytes": manifest.nbytes,
        "generation": manifest.generation,
        "seconds": round(seconds, 3),
    }
    if as_json:
        print_json(facts)
        return
    console = screen()
    console.print(
        f"{verb} {manifest.name}: {manifest.rows:,} rows, {format_bytes(manifest.nbytes)}, generation "
        f"{manifest.generation}, in {seconds:.1f} s",
        markup=False,
    )
    console.print(f"look at it: td-datapipes inspect '{shown_url(url)}'", markup=False, soft_wrap=True)


def export(
    url: DatasetURL,
    destination: Annotated[
        str,
        typer.Argument(metavar="DST", help="NAME.parquet, NAME.safetensors, or a folder (memory-mapped TensorDict)."),
    ],
    field: Annotated[
        list[str], typer.Option("--field", help='Only this field; repeat for more. ["n","y"] is a nested one.')
    ] = [],  # noqa: B006
    file_format: Annotated[
        str | None, typer.Option("--format", help=f"Where the name does not say it: {', '.join(EXPORT_FORMATS)}.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
    progress: Progress = None,
    as_json: AsJson = False,
    ask_password: AskPassword = False,
) -> None:
    """Write a data set to a file or a folder; ingest reads it back bit for bit."""
    del ask_password
    began = time.monotonic()
    fields = [parse_name(name) for name in field] or None
    rows = export_rows(url, destination, fields=fields, file_format=file_format, overwrite=overwrite, progress=progress)
    seconds = time.monotonic() - began
    if as_json:
        print_json({"rows": rows, "destination": destination, "seconds": round(seconds, 3)})
    else:
        screen().print(f"wrote {rows:,} rows to {destination} in {seconds:.1f} s", markup=False)
