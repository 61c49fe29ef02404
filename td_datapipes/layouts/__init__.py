"""Layouts: rows -> ranges and bytes -> TensorDict, for each way rows can lie on a server. Pure: no I/O."""

from __future__ import annotations

from td_datapipes.layouts.base import FieldPart, Layout, build_read_spec, nodes_of_parts
from td_datapipes.layouts.records import RecordsLayout, pack_records
from td_datapipes.layouts.tensordict_store import StoreDescription, TensorDictStoreLayout
from td_datapipes.manifest import Manifest

__all__ = [
    "FieldPart",
    "Layout",
    "RecordsLayout",
    "StoreDescription",
    "TensorDictStoreLayout",
    "build_read_spec",
    "layout_of",
    "nodes_of_parts",
    "pack_records",
]


def layout_of(description: Manifest | StoreDescription) -> Layout:
    """The layout a description is of."""
    if isinstance(description, StoreDescription):
        return TensorDictStoreLayout(description=description)
    return RecordsLayout(manifest=description)
