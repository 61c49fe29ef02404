"""Shares part an order among ranks and workers, and cursors find their place in it again."""

from __future__ import annotations

import json

import pytest

from td_datapipes.errors import StateError
from td_datapipes.shares import Cursor, Share, fingerprint, worker_batches, worker_spans


class TestShare:
    @pytest.mark.parametrize("world_size", [1, 2, 3, 5])
    @pytest.mark.parametrize("batch_size", [1, 2, 4])
    @pytest.mark.parametrize("start", [0, 5, 101])
    def test_ranks_part_the_order(self, world_size: int, batch_size: int, start: int) -> None:
        for length in (0, 1, 2, 3, 7, 8, 101):
            shares = [
                Share(length=length, start=start, batch_size=batch_size, rank=rank, world_size=world_size)
                for rank in range(world_size)
            ]
            assert len({share.num_batches for share in shares}) == 1
            for share in shares:
                alone = [share.positions(batch)[0].tolist() for batch in range(share.num_batches)]
                padded = [share.positions(batch)[1] for batch in range(share.num_batches)]
                assert [share.padded(batch) for batch in range(share.num_batches)] == padded
                for first in range(share.num_batches + 1):
                    at_once = share.positions_of(first, share.num_batches)
                    assert [positions.tolist() for positions in at_once] == alone[first:]
            seen: list[int] = []
            for batch in range(shares[0].num_batches):
                parts = [share.positions(batch) for share in shares]
                assert len({len(positions) for positions, _ in parts}) == 1
                for positions, padded in parts:
                    seen += positions[: len(positions) - padded].tolist()
                assert sum(padded for _, padded in parts) < world_size
            assert seen == list(range(start, length))

    def test_dropping_the_tail_loses_less_than_a_global_batch(self) -> None:
        for length in range(40):
            shares = [Share(length=length, batch_size=2, rank=rank, world_size=3, tail="drop") for rank in range(3)]
            kept = [
                position
                for batch in range(shares[0].num_batches)
                for share in shares
                for position in share.positions(batch)[0].tolist()
            ]
            assert kept == list(range(length - length % 6))
            assert all(share.positions(0)[1] == 0 for share in shares if share.num_batches)

    def test_padding_repeats_the_beginning(self) -> None:
        positions, padded = Share(length=5, batch_size=4, rank=3, world_size=4).positions(0)
        # 5 positions over 4 ranks are 2 each: ranks 0 and 1 are full, rank 2 has one of its own, rank 3 none.
        assert positions.tolist() == [0, 1]
        assert padded == 2

    def test_consumed_stops_at_the_end(self) -> None:
        share = Share(length=11, batch_size=2, world_size=2)
        assert [share.consumed(batches) for batches in range(4)] == [0, 4, 8, 11]


class TestWorkers:
    @pytest.mark.parametrize("num_workers", [1, 3, 4, 7])
    def test_each_row_goes_to_one_worker(self, num_workers: int) -> None:
        for rows in (0, 1, 3, 100, 101):
            spans = [
                list(worker_spans(rows, unit_rows=4, worker=worker, num_workers=num_workers))
                for worker in range(num_workers)
            ]
            assert sorted(row for own in spans for span in own for row in span) == list(range(rows))
            # Whoever drops a span that is not full loses fewer than 4 rows in all.
            assert sum(len(span) for own in spans for span in own if len(span) < 4) == rows % 4

    def test_batches_are_dealt_in_turn(self) -> None:
        assert [list(worker_batches(7, worker=worker, num_workers=3)) for worker in range(3)] == [
            [0, 3, 6],
            [1, 4],
            [2, 5],
        ]
        assert list(worker_batches(2, worker=3, num_workers=4)) == []


class TestCursor:
    def test_goes_through_json(self) -> None:
        cursor = Cursor(seed=1, epoch=2, rows=100, rows_consumed=40, fingerprint="x")
        assert Cursor.from_dict(json.loads(json.dumps(cursor.to_dict()))) == cursor

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"version": 2}, "version 1 is needed, got 2"),
            ({"epoch": -1}, "epoch is an integer >= 0, got -1"),
            ({"rows": "3"}, "rows is an integer >= 0, got '3'"),
            ({"fingerprint": None}, "fingerprint is a string, got None"),
        ],
    )
    def test_another_form_is_refused(self, change: dict[str, object], message: str) -> None:
        values = Cursor(seed=1, epoch=2, rows=100, rows_consumed=40, fingerprint="x").to_dict()
        with pytest.raises(StateError, match=message):
            Cursor.from_dict({**values, **change})

    def test_fingerprints_are_readable(self) -> None:
        class Data:
            fingerprint = "abc"

        assert fingerprint("Kind", Data(), 10, block_rows=2) == "Kind(rows=10, block_rows=2)@abc"
        assert fingerprint("Kind", [], 10) == "Kind(rows=10)"
