"""The names of the file formats that rows are read from and written to."""

from __future__ import annotations

__all__ = ["EXPORT_FORMATS", "FORMATS"]

FORMATS = ("parquet", "arrow", "huggingface", "memmap", "numpy", "safetensors")
"""What `ingest` reads."""
EXPORT_FORMATS = ("parquet", "safetensors", "memmap")
"""What `export` writes."""
