"""Commands that bring a server: demo and serve."""

from __future__ import annotations

import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from td_datapipes.cli.late import LateModule, late
from td_datapipes.cli.options import AsJson, add_command
from td_datapipes.cli.output import format_bytes, print_json, screen
from td_datapipes.errors import ConfigurationError, ServerUnavailableError, TDDatapipesError

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict
    from torch import nn
    from torch.utils.data import DataLoader

    from td_datapipes.catalog import connect
    from td_datapipes.datasets import RedisTDDataset
    from td_datapipes.server import open_embedded
    from td_datapipes.wire.server import Server
    from td_datapipes.writer import write_dataset
else:
    torch, nn = LateModule("torch"), LateModule("torch.nn")
    TensorDict = late("tensordict", "TensorDict")
    DataLoader = late("torch.utils.data", "DataLoader")
    connect = late("td_datapipes.catalog", "connect")
    RedisTDDataset = late("td_datapipes.datasets", "RedisTDDataset")
    open_embedded = late("td_datapipes.server", "open_embedded")
    write_dataset = late("td_datapipes.writer", "write_dataset")

__all__ = ["register"]

GOAL = 0.95
_HELD_OUT = 360
_POLL_SECONDS = 0.5


def register(app: typer.Typer) -> None:
    """Add the commands."""
    add_command(app, demo, "td-datapipes demo")
    add_command(app, serve, "td-datapipes serve ./data --maxmemory-mib 4096")


def demo(
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Where to write the demo's rows; by default a server of its own, for now."),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="How long to train.")] = 30,
    as_json: AsJson = False,
) -> None:
    """Write handwritten digits to a server and train a small model straight out of it."""
    images, labels = _digits()
    with _demo_url(url) as target:
        rows = TensorDict({"image": images, "label": labels}, batch_size=[len(images)])
        torch.manual_seed(0)
        rows = rows[torch.randperm(len(rows))]
        manifest = write_dataset(rows[:-_HELD_OUT], target, overwrite=True, progress=False)
        console = screen()
        if not as_json:
            console.print(
                f"wrote {manifest.rows:,} rows, {format_bytes(manifest.nbytes)}; training out of them", markup=False
            )
        with RedisTDDataset(target) as dataset:
            began = time.monotonic()
            model = _train(DataLoader(dataset, batch_size=64, shuffle=True), epochs)
            seconds = time.monotonic() - began
            read = dataset.stats.rows
    held_out = rows[-_HELD_OUT:]
    accuracy = float((model(held_out["image"]).argmax(1) == held_out["label"]).float().mean())
    if as_json:
        print_json({"rows": manifest.rows, "rows_read": read, "seconds": seconds, "accuracy": accuracy})
    else:
        console.print(f"read {read:,} rows and trained on them in {seconds:.1f} s", markup=False)
        console.print(f"right on {accuracy:.1%} of {_HELD_OUT} rows that it had not seen", markup=False)
        console.print("next: td-datapipes serve ./data, then td-datapipes ingest FILE URL", markup=False)
    if accuracy < GOAL:
        raise TDDatapipesError(f"the model should be right on {GOAL:.0%}; train for longer: --epochs {2 * epochs}")


def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ConfigurationError("the demo needs scikit-learn: pip install 'td-datapipes[demo]'") from None
    digits: Any = load_digits()
    return torch.as_tensor(digits.images, dtype=torch.float32) / 16, torch.as_tensor(digits.target)


@contextmanager
def _demo_url(url: str | None) -> Iterator[str]:
    if url is not None:
        yield url
        return
    with tempfile.TemporaryDirectory(prefix="td-demo-", ignore_cleanup_errors=True) as folder:
        yield f"embedded://{folder}#digits"


def _train(loader: DataLoader[TensorDict], epochs: int) -> nn.Module:
    torch.set_num_threads(1)  # faster where the model is this small
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch["image"]), batch["label"]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return model.eval()


def serve(
    folder: Annotated[Path, typer.Argument(help="Where its data lies; made where it is missing.")] = Path("td-data"),
    maxmemory_mib: Annotated[
        int | None, typer.Option("--maxmemory-mib", min=0, help="Limit of its memory; 0 for none.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run the embedded server in the foreground, until Ctrl-C.

    Any program on this machine reaches it by the URL that is printed; it ends when nobody uses it any more.
    """
    limit = None if maxmemory_mib is None else maxmemory_mib << 20
    path = folder.expanduser().resolve()
    url = f"embedded://{path}"
    ended = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda _number, _frame: ended.set())
    try:
        # Connected before anybody is told that it serves: Ctrl-C must not meet an import.
        with open_embedded(path, maxmemory_bytes=limit) as server, closing(connect(url, require_name=False)) as watched:
            where = server.listening()
            # For programs that cannot read an embedded:// URL. The password is new with each start.
            local = f"redis://:{where.password}@127.0.0.1:{where.port}/0"
            if not where.port:
                local = f"unix://:{where.password}@{where.socket_path}?db=0"
            if as_json:
                print_json({"url": url, "local_url": local, "folder": str(path)})
            else:
                console = screen()
                console.print("serving", path, style=None, markup=False, soft_wrap=True)
                console.print(f"  {url}#NAME", markup=False, soft_wrap=True)
                console.print(f"  {local}#NAME  (while it runs)", markup=False, soft_wrap=True)
                console.print("Ctrl-C ends it", markup=False)
            sys.stdout.flush()
            _wait(watched, ended)
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait(server: Server, ended: threading.Event) -> None:
    """Until told to end, or until the server is gone."""
    try:
        while not ended.wait(_POLL_SECONDS):
            server.call("looking whether it runs", lambda client: client.ping())
    except KeyboardInterrupt:
        return
    except ServerUnavailableError as error:
        raise ServerUnavailableError(f"the server has ended: {error}") from error
