"""Which of how many ranks this process is."""

from __future__ import annotations

import torch.distributed as dist

from td_datapipes.errors import ConfigurationError

__all__ = ["resolve_ranks"]


def resolve_ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """(rank, world_size) as given, else the default process group's, else (0, 1).

    Raises:
        ConfigurationError: only one of the two is given, or rank is not in [0, world_size).
    """
    if (rank is None) != (world_size is None):
        raise ConfigurationError(f"give both rank and world_size or neither, got rank={rank}, world_size={world_size}")
    if rank is None or world_size is None:
        if not (dist.is_available() and dist.is_initialized()):
            return 0, 1
        return dist.get_rank(), dist.get_world_size()
    if world_size < 1 or not 0 <= rank < world_size:
        raise ConfigurationError(f"rank must be in [0, world_size), got rank={rank}, world_size={world_size}")
    return rank, world_size
