"""Files into a data set on a cluster: taken up after an interruption, verified, shown by shard."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from servers import ClusterProcess

from td_datapipes import RedisTDDataset, verify_dataset
from td_datapipes.cli.app import run
from td_datapipes.group_chunks import GroupChunks
from td_datapipes.ingest import ingest


def test_files_are_ingested_and_taken_up_on_a_cluster(cluster: ClusterProcess, tmp_path: Path) -> None:
    values = np.arange(4000, dtype=np.int64)
    pq.write_table(pa.table({"a": values, "b": values * 2}), tmp_path / "t.parquet", row_group_size=300)
    url = cluster.url("from/file")

    def break_off(self: GroupChunks) -> None:
        plain(self)
        if self.rows >= 2000:
            raise KeyboardInterrupt

    plain, GroupChunks.flush = GroupChunks.flush, break_off  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            ingest(tmp_path, url, chunk_bytes=1600)
    finally:
        GroupChunks.flush = plain  # type: ignore[method-assign]
    manifest = ingest(tmp_path, url, chunk_bytes=1600)
    assert len(manifest.tags) > 1
    assert verify_dataset(url).good
    with RedisTDDataset(url) as dataset:
        assert dataset[:]["b"].tolist() == (values * 2).tolist()
    ingest(tmp_path, url, append=True)
    assert verify_dataset(url).good
    with RedisTDDataset(url) as dataset:
        assert dataset[4000:]["a"].tolist() == values.tolist()
    out = StringIO()
    with redirect_stdout(out):
        assert run(["inspect", url, "--json"]) == 0
    shares = json.loads(out.getvalue())["shares"]
    assert [share["tag"] for share in shares] == list(manifest.tags)
    assert len({share["node"] for share in shares}) == 3
    assert sum(share["chunks"] for share in shares) == manifest.layouts[0].num_chunks(8000)
