"""The numba kernels in one place, with their compilation cached in a folder of ours."""

# mypy: ignore-errors
from __future__ import annotations

import numba

from expertwire import _env

# numba reads the folder when a function is decorated; the setting is put back for everybody else.
_before = numba.config.CACHE_DIR
numba.config.CACHE_DIR = _env.cache_dir("numba")
try:
    from expertwire.host.logfmt import decode_logfmt, encode_logfmt
    from expertwire.host.memory import publish, read_word, wait_word
    from expertwire.host.quantize import decode_fp8, encode_fp8
    from expertwire.host.rows import (
        count_experts,
        first_illegal,
        first_repeat,
        move_rows,
        place_experts,
        read_routing,
        reduce_rows,
        route,
        write_routing,
    )
finally:
    numba.config.CACHE_DIR = _before

__all__ = [
    "count_experts",
    "decode_fp8",
    "decode_logfmt",
    "encode_fp8",
    "encode_logfmt",
    "first_illegal",
    "first_repeat",
    "move_rows",
    "place_experts",
    "publish",
    "read_routing",
    "read_word",
    "reduce_rows",
    "route",
    "wait_word",
    "write_routing",
]
