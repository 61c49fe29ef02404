"""The installed command, run as a process: screens of 80 columns, with and without a terminal, and exit codes."""

from __future__ import annotations

import fcntl
import io
import json
import multiprocessing
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rows_in_memory import assert_same_rows, random_rows
from servers import ServerProcess, wait_until
from tensordict import NonTensorStack, TensorDict

from td_datapipes import RedisTDDataset, write_dataset
from td_datapipes.catalog import connect, list_names
from td_datapipes.cli import app
from td_datapipes.cli.output import duration_seconds, format_bytes, format_duration, one_line, shown_url
from td_datapipes.errors import ConfigurationError
from td_datapipes.reports import find_reports

COMMAND = Path(sys.executable).with_name("td-datapipes")
COMMANDS = (
    "demo",
    "serve",
    "ls",
    "inspect",
    "gc",
    "verify",
    "rm",
    "ingest",
    "append",
    "convert",
    "export",
    "bench",
    "top",
)
SECRET = "Sw0rdf1sh-9c41"
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
TIMEOUT_SECONDS = 90.0


def environment(more: Mapping[str, str]) -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("TD_DATAPIPES")}
    return {**plain, "COLUMNS": "80", "TERM": "xterm-256color", **more}


def run(*arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
    """What the installed command runs, in this process: starting one takes seconds."""
    out, err = io.StringIO(), io.StringIO()
    with patch.dict(os.environ, environment(more), clear=True), redirect_stdout(out), redirect_stderr(err):
        code = app.run([str(argument) for argument in arguments])
    return checked(subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue()))


def run_installed(*arguments: object, folder: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
    """The installed command, without a terminal."""
    done = subprocess.run(
        [COMMAND, *map(str, arguments)],
        cwd=folder,
        env=environment(more),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=TIMEOUT_SECONDS,
    )
    return checked(done)


def checked(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    assert "Traceback" not in done.stderr, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    return done


def output_of(*arguments: object, **more: str) -> str:
    """The screen of a command that ends well."""
    return screen_of(run(*arguments, **more))


def screen_of(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    assert max((len(line) for line in done.stdout.splitlines()), default=0) <= 80 or "look at it" in done.stdout
    return "\n".join(line.rstrip() for line in done.stdout.splitlines())


def json_of(*arguments: object, **more: str) -> Any:
    done = run(*arguments, "--json", **more)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def fails(code: int, *arguments: object, **more: str) -> str:
    """The one line that a command ends with."""
    return failure_of(run(*arguments, **more), code)


def failure_of(done: subprocess.CompletedProcess[str], code: int) -> str:
    assert done.returncode == code, done.stdout + done.stderr
    *before, line = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert before in ([], ["what has arrived is kept; the same command goes on from there"])
    return line.removeprefix("error: ")


def run_on_terminal(
    *arguments: object, typed: Sequence[tuple[str, str]] = (), until: str | None = None, **more: str
) -> tuple[int, str]:
    """On a terminal of 80 columns.

    Args:
        arguments: of the command.
        typed: what is typed, and after which text.
        until: Ctrl-C is typed after this text.
        more: of the environment.

    Returns:
        The exit code, and everything that was written to the terminal.
    """
    control, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 80, 0, 0))
    settings = environment(more)
    del settings["COLUMNS"]
    process = subprocess.Popen(
        [COMMAND, *map(str, arguments)],
        env=settings,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        start_new_session=True,
    )
    os.close(terminal)
    waiting = [*typed, *([] if until is None else [(until, "\x03")])]
    seen, deadline = "", time.monotonic() + TIMEOUT_SECONDS
    try:
        while time.monotonic() < deadline:
            if not select.select([control], [], [], 1.0)[0]:
                continue
            try:
                data = os.read(control, 65536)
            except OSError:  # the other side is closed
                break
            if not data:
                break
            seen += data.decode(errors="replace")
            if waiting and waiting[0][0] in seen:
                os.write(control, waiting.pop(0)[1].encode())
        code = process.wait(max(1.0, deadline - time.monotonic()))
    finally:
        process.kill()
        process.wait()
        os.close(control)
    assert "Traceback" not in seen, seen
    assert not waiting, seen
    return code, seen


@pytest.fixture
def server(valkey_server: ServerProcess) -> ServerProcess:
    """One of them, empty: what differs between servers is tested elsewhere."""
    valkey_server.flush()
    return valkey_server


def people(rows: int = 100) -> pa.Table:
    rng = np.random.default_rng(0)
    return pa.table(
        {
            "age": pa.array(rng.integers(0, 90, rows), pa.int32()),
            "weight": rng.random(rows).astype(np.float32),
            "face": pa.FixedSizeListArray.from_arrays(rng.integers(0, 256, rows * 6, dtype=np.uint8), 6),
            "name": [[f"person {row}"] for row in range(rows)],
        }
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name: str) -> None:
    text = " ".join(output_of(name, "--help").split())
    assert f"Usage: td-datapipes {name}" in text
    assert f"Example: td-datapipes {name}" in text
    assert "--json" in text


def test_the_installed_command_lists_its_commands_and_exit_codes() -> None:
    text = screen_of(run_installed("--help"))
    assert text == output_of("--help")  # in this process it is the same
    for name in COMMANDS:
        assert re.search(rf"^│ {name} ", text, re.MULTILINE)
    assert re.search(r"Exit codes: 0 done; .*130 interrupted", " ".join(text.split()))


def test_ingest_look_append_export_and_remove(server: ServerProcess, tmp_path: Path) -> None:
    pq.write_table(people(), tmp_path / "people.parquet")
    url = server.url("my/people")
    line = failure_of(run_installed("ingest", tmp_path / "people.parquet", url), 6)
    assert line.startswith(f"column 'name' of {tmp_path}/people.parquet is list<element: string>, which cannot be")
    assert "--drop name" in line
    assert json_of("ls", server.url())["datasets"] == []
    done = run_installed("ingest", "people.parquet", url, "--drop", "name", "--chunk-kib", 1, folder=tmp_path)
    assert re.sub(r"\d+\.\d s", "T s", screen_of(done)).splitlines() == [
        "published my/people: 100 rows, 1.6 KiB, generation 1, in T s",
        f"look at it: td-datapipes inspect '{url}'",
    ]
    with RedisTDDataset(url) as dataset:
        assert dataset[:]["age"].tolist() == people()["age"].to_pylist()
        assert dataset[:]["face"].tolist() == people()["face"].to_pylist()
    line = fails(4, "ingest", tmp_path / "people.parquet", url, "--drop", "name")
    assert "data set 'my/people' exists" in line
    pq.write_table(people().slice(0, 10), tmp_path / "more.parquet")
    more = json_of("append", tmp_path / "more.parquet", url, "--drop", "name", "--filter", "age >= 0")
    assert (more["rows"], more["generation"]) == (110, 2)
    assert "field 'age' is missing there" in fails(6, "append", tmp_path / "more.parquet", url, "--column", "weight")
    assert json_of("export", url, tmp_path / "out.parquet")["rows"] == 110
    assert pq.read_table(tmp_path / "out.parquet")["age"].to_pylist()[100:] == people()["age"].to_pylist()[:10]
    assert "exists" in fails(4, "export", url, tmp_path / "out.parquet")
    assert "nobody can be asked" in fails(2, "rm", url)
    assert screen_of(run_installed("rm", url, "--yes")) == "removed my/people (110 rows)"
    assert "there is no data set 'my/people'" in fails(3, "inspect", url)


def test_the_screens_of_ls_and_inspect(server: ServerProcess) -> None:
    td = TensorDict({"image": torch.arange(12).reshape(4, 3) / 4, "label": torch.arange(4)}, [4])
    td["n"] = TensorDict({"half": torch.full((4,), float("nan"), dtype=torch.bfloat16)}, [4])
    write_dataset(td, server.url("digits"))
    write_dataset(random_rows(70_000, {"x": (torch.float32, (16,))}), server.url("a much/longer name"))
    dated = re.sub(r"\d{4}-\d\d-\d\d", "YYYY-MM-DD", output_of("ls", server.url()))
    assert dated == (
        "name                   rows      size    row   fields   gen      written\n"
        "────────────────────────────────────────────────────────────────────────\n"
        "a much/longer name   70,000   4.3 MiB   64 B        1     1   YYYY-MM-DD\n"
        "digits                    4     128 B   32 B        3     1   YYYY-MM-DD"
    )
    screen = output_of("inspect", server.url("digits"), "--rows", 2)
    screen = re.sub(r"of \d{4}-\S+", "of TIME", screen)
    screen = re.sub(r"memory.*\n(?:  .*\n)*", "memory    MEMORY\n", screen)
    assert screen == (
        "data set  digits\n"
        f"server    redis://127.0.0.1:{server.port}/0\n"
        "rows      4 of 32 B: 128 B\n"
        "kind      frozen, generation 1 of TIME\n"
        "chunks    1 in 1 shard\n"
        "memory    MEMORY\n"
        "\n"
        "field    dtype      shape   bytes   at\n"
        "──────────────────────────────────────\n"
        "image    float32    [3]        12    0\n"
        "label    int64      []          8   16\n"
        "n.half   bfloat16   []          2   24\n"
        "\n"
        "row   image           label   n.half\n"
        "────────────────────────────────────\n"
        "  0   [0 0.25 0.5]    0       nan\n"
        "  1   [0.75 1 1.25]   1       nan"
    )
    told = json_of("inspect", server.url("digits"), "--rows", 1)
    assert told["first_rows"] == [{"image": [0.0, 0.25, 0.5], "label": 0, "n.half": "nan"}]
    assert (told["rows"], told["chunks"], told["shards"], told["generation"]) == (4, 1, 1, 1)
    assert told["memory_bytes"] > 128


def test_inspect_shows_values_of_variable_length(server: ServerProcess) -> None:
    tokens = torch.nested.nested_tensor_from_jagged(torch.arange(10).reshape(5, 2), offsets=torch.tensor([0, 1, 1, 5]))
    td = TensorDict({"tokens": tokens, "title": NonTensorStack("one", None, "x" * 100)}, [3])
    td["raw"] = NonTensorStack(b"", b"\xff\x01", None)
    td["notes"] = NonTensorStack({"a": 1}, [2, None], None)
    write_dataset(td, server.url("documents"))
    screen = output_of("inspect", server.url("documents")).split("\n\n")
    assert [re.split(r"  +", line.strip()) for line in screen[1].splitlines()[2:]] == [
        ["tokens", "int64", "[*, 2]", "16 + ~27", "0"],
        ["title", "str", "16 + ~35", "16"],
        ["raw", "bytes", "16 + ~1", "32"],
        ["notes", "json", "16 + ~7", "48"],
    ]
    assert [re.split(r"  +", line.strip()) for line in screen[2].splitlines()[2:]] == [
        ["0", "[0 1]", "'one'", "b''", "{'a': 1}"],
        ["1", "[]", "None", "b'\\xff\\x01'", "[2, None]"],
        ["2", "[2 3 4 …]", "'" + "x" * 28 + "…", "None", "None"],
    ]
    told = json_of("inspect", server.url("documents"), "--rows", 2)
    assert told["first_rows"] == [
        {"tokens": [[0, 1]], "title": "one", "raw": "", "notes": {"a": 1}},
        {"tokens": [], "title": None, "raw": "ff01", "notes": [2, None]},
    ]


def test_a_terminal_gets_bars_and_colour_and_80_columns(server: ServerProcess, tmp_path: Path) -> None:
    pq.write_table(people(20_000), tmp_path / "people.parquet")
    code, seen = run_on_terminal("ingest", tmp_path / "people.parquet", server.url("p"), "--drop", "name")
    assert code == 0
    assert "\x1b[" in seen
    plain = ESCAPE.sub("", seen)
    assert re.search(r"writing p .*20000/20000 rows", plain)
    assert "published p: 20,000 rows" in plain
    code, seen = run_on_terminal("inspect", server.url("p"))
    lines = ESCAPE.sub("", seen).splitlines()
    assert code == 0
    assert max(map(len, lines)) <= 80
    assert "data set  p" in lines[0]
    assert "\x1b[1m" in seen


def test_removal_is_asked_for_on_a_terminal(server: ServerProcess) -> None:
    write_dataset(random_rows(3, {"x": (torch.float32, ())}), server.url("x"))
    question = "remove x: 3 rows, 48 B? [y/N]"
    code, seen = run_on_terminal("rm", server.url("x"), typed=[(question, "n\n")])
    assert (code, json_of("ls", server.url())["datasets"][0]["name"]) == (1, "x"), seen
    code, seen = run_on_terminal("rm", server.url("x"), typed=[(question, "y\n")])
    assert (code, json_of("ls", server.url())["datasets"]) == (0, []), seen


def test_wrong_use_is_told_in_one_line_with_the_way_out() -> None:
    assert fails(2, "nosuch").startswith("No such command 'nosuch'")
    assert fails(2, "ls") == "Missing argument 'URL'; see td-datapipes ls --help"
    assert "see td-datapipes bench --help" in fails(2, "bench", "redis://localhost:1/0#x", "--batch-size", "many")
    assert "the URL's scheme is 'http'" in fails(2, "ls", "http://localhost")
    assert "names no data set; add it as the fragment" in fails(2, "inspect", "redis://localhost:1/0")
    assert "'soon' is no duration; write 90s" in fails(2, "gc", "redis://localhost:1/0", "--older-than", "soon")
    done = run_installed()
    assert (done.returncode, done.stderr) == (2, "")
    assert "Usage: td-datapipes" in done.stdout


def test_bad_options_of_ingest_are_named(server: ServerProcess, tmp_path: Path) -> None:
    pq.write_table(people(), tmp_path / "p.parquet")
    arguments = ("ingest", tmp_path / "p.parquet", server.url("x"), "--drop", "name")
    assert "--fill age=x fills with no number" in fails(2, *arguments, "--fill", "age=x")
    assert "--shape face is no shape; write COLUMN=84x84" in fails(2, *arguments, "--shape", "face")
    assert "drop names 'q', which" in fails(2, *arguments, "--drop", "q")
    assert "the filter names 'q', which" in fails(2, *arguments, "--filter", "q > 3")
    assert "there is no file or directory" in fails(6, "ingest", tmp_path / "none", server.url("x"))


def test_a_missing_server_is_an_error_without_the_password() -> None:
    line = fails(5, "ls", f"redis://user:{SECRET}@localhost:1/0")
    assert line.startswith("no server answers at redis://localhost:1/0 ")
    assert SECRET not in line
    assert SECRET not in fails(2, "ls", f"redis://user:{SECRET}@localhost:1/0", f"redis://:{SECRET}@there")
    done = run_installed("inspect", f"redis://:{SECRET}@localhost:1/0#x", "--json")
    told = json.loads(done.stderr)["error"]
    assert (done.returncode, done.stdout, told["exit_code"], told["type"]) == (5, "", 5, "ServerUnavailableError")
    assert SECRET not in done.stderr


@pytest.fixture(scope="module")
def guarded() -> Iterator[ServerProcess]:
    with ServerProcess("redis", password=SECRET) as process:
        yield process


def test_passwords_come_from_the_environment_or_a_prompt_and_are_never_shown(guarded: ServerProcess) -> None:
    write_dataset(random_rows(3, {"x": (torch.float32, ())}), guarded.url("x"))
    url = f"redis://127.0.0.1:{guarded.port}/0"
    assert "refused access" in fails(5, "ls", url)
    assert "--ask-password needs a terminal" in fails(2, "ls", url, "-W")
    assert json_of("ls", url, TD_DATAPIPES_PASSWORD=SECRET)["datasets"][0]["name"] == "x"
    code, seen = run_on_terminal("ls", url, "--ask-password", typed=[("password: ", SECRET + "\n")])
    assert code == 0
    assert "x" in seen
    assert SECRET not in seen
    code, seen = run_on_terminal("inspect", f"{url}#x", "-W", typed=[("password: ", "wrong\n")])
    assert code == 5
    assert "wrong" not in seen.replace("WRONGPASS", "")
    told = output_of("ingest", Path(__file__).parents[1] / "data/huggingface/saved", guarded.url("y"), "-c", "id")
    assert SECRET not in told
    assert f"look at it: td-datapipes inspect 'redis://127.0.0.1:{guarded.port}/0#y'" in told


def test_a_full_server_keeps_what_came_and_the_same_command_goes_on(tmp_path: Path) -> None:
    values = np.random.default_rng(0).random(1000 * 4000)
    table = pa.table({"v": pa.FixedSizeListArray.from_arrays(pa.array(values), 1000), "i": np.arange(4000)})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=500, use_dictionary=False)
    with ServerProcess("redis") as process:
        process.execute("CONFIG", "SET", "maxmemory", "16mb")
        # How many rows pass the filter is not known before, so it is not refused before.
        arguments = ("ingest", tmp_path / "t.parquet", process.url("t"), "--filter", "i >= 0")
        assert "maxmemory" in fails(5, *arguments)
        process.execute("CONFIG", "SET", "maxmemory", "0")
        assert json_of(*arguments)["rows"] == 4000
        with RedisTDDataset(process.url("t")) as dataset:
            assert torch.equal(dataset[3990:]["v"], torch.from_numpy(values).reshape(4000, 1000)[3990:])


def test_gc_says_what_it_removes(server: ServerProcess) -> None:
    td = random_rows(30, {"x": (torch.float32, ())})
    write_dataset(td, server.url("x"))
    write_dataset(td[:20], server.url("x"), overwrite=True)
    assert output_of("gc", server.url()) == "nothing to remove that is older than 1.0 h"
    keys = sorted(server.execute("KEYS", "*"))
    assert output_of("gc", server.url(), "--older-than", "0s", "--dry-run") == (
        "would remove generation 1 of x (30 rows)"
    )
    assert sorted(server.execute("KEYS", "*")) == keys
    told = json_of("gc", server.url(), "--older-than", "0s")
    assert [(item["name"], item["generation"], item["rows"]) for item in told["generations"]] == [("x", 1, 30)]
    assert (
        len(server.execute("KEYS", "*")) == len(keys) - 3
    )  # a chunk, its checksum, and the hash of earlier generations
    with RedisTDDataset(server.url("x")) as dataset:
        assert_same_rows(dataset[:], td[:20])


def test_verify_names_bad_chunks(server: ServerProcess) -> None:
    manifest = write_dataset(random_rows(30, {"x": (torch.float32, (4,))}), server.url("x"), chunk_bytes=160)
    assert output_of("verify", server.url("x")) == "x: 3 chunks, 480 B compared with checksums, 0 of them bad"
    server.execute("SETRANGE", manifest.chunk_key(0, 1), 5, b"?")
    done = run("verify", server.url("x"), "--json")
    assert done.returncode == 7
    (bad,) = json.loads(done.stdout)["bad"]
    assert (bad["first_row"], bad["stop_row"], bad["problem"]) == (10, 20, "altered")


def test_convert_copies_to_the_other_layout_and_back(server: ServerProcess) -> None:
    td = random_rows(30, {"x": (torch.float32, (4,))})
    write_dataset(td, server.url("x"))
    assert json_of("convert", server.url("x"), server.url("store"))["rows"] == 30
    assert output_of("convert", server.url("store"), server.url("y")).startswith("copied 30 rows to y in ")
    assert "layout must be 'records'" in fails(2, "convert", server.url("x"), server.url("z"), "--layout", "csv")
    with RedisTDDataset(server.url("y")) as dataset:
        assert_same_rows(dataset[:], td)


@pytest.mark.timeout(200)
def test_serve_runs_until_it_is_told_to_end(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [COMMAND, "serve", "data"], cwd=tmp_path, env=environment({}), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        lines = [process.stdout.readline().strip() for _ in range(4)]
        assert lines[0] == f"serving {tmp_path}/data"
        url = lines[1].removesuffix("#NAME")
        assert url == f"embedded://{tmp_path}/data"
        write_dataset(random_rows(3, {"x": (torch.float32, ())}), f"{url}#x")
        socket_url = lines[2].split()[0].replace("#NAME", "#x")
        with RedisTDDataset(socket_url) as dataset:
            assert len(dataset) == 3
        assert json_of("ls", url)["datasets"][0]["name"] == "x"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    server = connect(url, require_name=False)
    assert list_names(server) == ["x"]  # its data is in the folder
    server.close()


def test_ctrl_c_ends_a_command_in_one_line(server: ServerProcess) -> None:
    write_dataset(random_rows(3, {"x": (torch.float32, ())}), server.url("x"))
    code, seen = run_on_terminal("top", server.url("x"), "--interval", "0.2", until="nobody reads")
    assert code == 130
    assert "error: interrupted" in ESCAPE.sub("", seen)


@pytest.mark.heavy
@pytest.mark.timeout(200)
def test_the_demo_trains_on_its_own_server_and_on_another(server: ServerProcess) -> None:
    done = run_installed("demo", "--json")
    told = json.loads(done.stdout)
    assert done.returncode == 0
    assert (told["rows"], told["rows_read"]) == (1437, 30 * 1437)
    assert told["accuracy"] >= 0.95
    done = run("demo", "--url", server.url("d"), "--epochs", "1")
    assert (done.returncode == 0) == ("right on 9" in done.stdout)
    assert len(RedisTDDataset(server.url("d"))) == 1437


def test_bench_measures_each_order_and_size_and_draws(server: ServerProcess, tmp_path: Path) -> None:
    write_dataset(random_rows(3000, {"x": (torch.float32, (16,)), "y": (torch.int8, ())}), server.url("x"))
    sizes = ("-b", 16, "-b", 128)
    told = json_of("bench", server.url("x"), "--seconds", "0.05", *sizes, "--plot", tmp_path / "speed.png")
    assert [(item["order"], item["batch_size"]) for item in told["results"]] == [
        (order, size) for size in (16, 128) for order in ("scattered", "block-shuffled", "in order")
    ]
    for item in told["results"]:
        assert item["rows_per_second"] > 0
        assert 0 <= item["wait_share"] <= 1
        assert item["rows_per_second"] * item["batch_seconds"] == pytest.approx(item["batch_size"], rel=0.2)
        assert item["bytes_per_second"] == pytest.approx(item["rows_per_second"] * told["row_bytes"])
    image = (tmp_path / "speed.png").read_bytes()
    assert image.startswith(b"\x89PNG")
    assert struct.unpack(">II", image[16:24]) == (1050, 600)
    screen = screen_of(run_installed("bench", server.url("x"), "--seconds", "0.05", "-b", 16, "--field", "x"))
    assert screen.splitlines()[0] == "x: 3,000 rows of 64 B"
    assert [line.split()[0] for line in screen.splitlines()[3:]] == ["scattered", "block-shuffled", "in"]
    assert "cannot be written" in fails(
        4, "bench", server.url("x"), "--seconds", "0.05", "--plot", tmp_path / "no/x.png"
    )


def read_on(url: str, stop: Any) -> None:
    torch.set_num_threads(1)
    with RedisTDDataset(url) as dataset:
        while not stop.wait(0.01):
            dataset[[3, 1, 2]]


@pytest.mark.timeout(200)
def test_top_sees_who_reads_what(server: ServerProcess) -> None:
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    for name in ("x", "y"):
        write_dataset(random_rows(30, {"x": (torch.float32, (16,))}), server.url(name))
    children = [context.Process(target=read_on, args=(server.url(name), stop)) for name in ("x", "x", "y")]
    watching = connect(server.url(), require_name=False)
    try:
        for child in children:
            child.start()
        wait_until(
            lambda: sum(report.name in ("x", "y") for report in find_reports(watching)) == 3, "all readers to report"
        )
        told = json_of("top", server.url())
        # A killed process of another test may hold its connection for a while yet.
        readers = [item for item in told["readers"] if item["name"] in ("x", "y")]
        assert {(item["name"], item["reader"]) for item in readers} == {
            (name, f"127.0.0.1, process {child.pid}") for name, child in zip(("x", "x", "y"), children, strict=True)
        }
        for item in readers:
            assert item["rows_per_second"] > 0
            assert item["bytes_per_second"] == pytest.approx(item["rows_per_second"] * 64, rel=0.5)
            assert 0 < item["wait_share"] <= 1
            assert item["rows"] > 0
        screen = screen_of(run_installed("top", server.url("x")))
        assert screen.splitlines()[0].endswith("#x")
        readers = [line for line in screen.splitlines() if "process" in line]
        assert [line.split()[0] for line in readers] == ["x", "x"]
        assert screen.splitlines()[-1].startswith("all ")
        code, seen = run_on_terminal("top", server.url(), "--interval", "1.5", "--count", "2")
        assert code == 0
        assert "rows/s" in seen
    finally:
        stop.set()
        for child in children:
            child.join()
        watching.close()
    assert "there is no data set" in fails(3, "top", server.url("none"))


def test_without_typer_one_line_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'typer' else find(name, *a)\n"
    )
    done = run_installed("ls", "redis://localhost:1/0", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: the command td-datapipes needs typer: pip install 'td-datapipes[cli]'\n"


def test_sizes_times_and_messages_are_written_for_people() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 5 << 20, 3 << 40)] == [
        "0 B",
        "1,023 B",
        "1.5 KiB",
        "5.0 MiB",
        "3.0 TiB",
    ]
    assert [format_duration(s) for s in (3, 90, 5400, 2 * 86400)] == ["3 s", "1.5 min", "1.5 h", "2.0 d"]
    assert [duration_seconds(t) for t in ("90", "90s", "1.5h", "2d")] == [90, 90, 5400, 172800]
    with pytest.raises(ConfigurationError, match="'-1h' is no duration"):
        duration_seconds("-1h")
    assert one_line("a\n b\n\nc") == "a; b; c"
    assert (
        one_line("at redis://u:p@ss/w@host:1/0, see redis://h/0#a@b") == "at redis://***@host:1/0, see redis://h/0#a@b"
    )
    assert shown_url("redis://u:p@host:1/0#a@b") == "redis://host:1/0#a@b"
