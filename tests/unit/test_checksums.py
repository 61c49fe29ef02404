"""Checksums are CRC-32, whoever computes them: of the same bytes, in whatever parts, continued or not."""

from __future__ import annotations

import runpy
import sys
import zlib

import numpy as np
import pytest

from td_datapipes import checksums

CHECK = 0xCBF43926
"""What the catalogue of CRCs has for the digits 1 to 9."""


@pytest.mark.parametrize("installed", [True, False])
def test_whoever_computes_it_it_is_the_same(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    if not installed:
        monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    # A copy of its own: others have the functions of the module as it is.
    crc32 = runpy.run_path(checksums.__file__)["crc32"]
    assert installed or crc32 is zlib.crc32
    assert crc32(b"123456789") == CHECK
    assert crc32(memoryview(b"0123456789")[1:]) == CHECK
    data = np.random.default_rng(0).integers(0, 256, 100_003, dtype=np.uint8).data
    for cut in (0, 1, 15, 4097, 100_003):
        assert crc32(data[cut:], crc32(data[:cut])) == zlib.crc32(data)
