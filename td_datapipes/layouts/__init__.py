"""Layouts: rows -> ranges and bytes -> TensorDict, for each way rows can lie on a server. Pure: no I/O."""

from __future__ import annotations

from td_datapipes.layouts.base import FieldPart, Layout, build_read_spec, nodes_of_parts
from td_datapipes.layouts.records import RecordsLayout, pack_records

__all__ = ["FieldPart", "Layout", "RecordsLayout", "build_read_spec", "nodes_of_parts", "pack_records"]
