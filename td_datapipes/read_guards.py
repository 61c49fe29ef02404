"""What a read relies on at the server: descriptions that have not changed, scripts that are there."""

from __future__ import annotations

from collections.abc import Sequence

import redis

from td_datapipes.manifest import Manifest
from td_datapipes.schema import Field
from td_datapipes.upstream import Description
from td_datapipes.wire.guards import Guard
from td_datapipes.wire.scripts import load_script
from td_datapipes.wire.server import Server

__all__ = ["guard_of", "load_read_scripts"]


def guard_of(description: Description, fields: Sequence[Field]) -> Guard | None:
    """What must not change while rows are read: what says where they are and what their bytes mean.

    A frozen generation never changes. A mutable data set has its generation for that, a store its leaves' metadata.
    """
    if isinstance(description, Manifest):
        if description.kind != "mutable":
            return None
        return Guard.of_string(description.structure_key, b"%d" % description.generation)
    leaves = [description.leaf_of[field.key] for field in fields if field.nbytes]
    return Guard.of_hashes((description.meta_key(leaf.path), leaf.expected) for leaf in leaves)


def load_read_scripts(server: Server) -> None:
    """Have every node know the scripts that read; one of a cluster that does not answer is left out."""

    def command(client: redis.Redis) -> None:
        cluster = server.cluster()
        clients = [client] if cluster is None else [one for _, one in cluster.everyone()]
        for one in clients:
            try:
                for name in ("read_ranges", "read_columns"):
                    one.script_load(load_script(name).source)
            except (redis.ConnectionError, redis.TimeoutError):
                if cluster is None:
                    raise

    server.call("loading a script", command, repeats=True)
