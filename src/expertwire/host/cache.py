"""Where compiled kernels are kept between processes."""

from __future__ import annotations

import os
import tempfile
import zlib
from pathlib import Path

import numba

from expertwire import _env

_SOURCES = ("host/memory.py", "host/rows.py", "host/quantize.py", "host/logfmt.py", "formats/logfmt.py")


def _folder() -> str | None:
    """One folder per state of the sources: numba itself looks only at the file of a function, not at what it calls.

    None if it cannot be written, as `expertwire doctor` tells. Numba would then look for another place by itself, where
    states of the sources share a folder.
    """
    digest = zlib.crc32(numba.__version__.encode())
    for name in _SOURCES:
        digest = zlib.crc32(Path(__file__).parent.parent.joinpath(name).read_bytes(), digest)
    folder = os.path.join(_env.cache_dir("numba"), f"{digest:08x}")
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError:
        return None
    return folder


FOLDER = _folder()
KEEP = FOLDER is not None
