"""What a profiler is told about a launch: the bytes that it moves if every id is a selection.

Triton's profiler (proton) shows GB/s from them. They are made only while a profiler listens (`launch`). Bytes of
`copy_rows` are not told: how many rows are in use is known on the device only.
"""

from __future__ import annotations

from typing import Any


def dispatch_send_bytes(grid: object, metadata: Any, args: dict[str, Any]) -> dict[str, Any]:
    """x and given scale factors are read once, payload and scale factors written SENDS times.

    >>> sizes = {"num_tokens": 4096, "width": 7168, "unit_bytes": 2, "FP8": True, "sf_units": 56, "sf_unit_bytes": 4}
    >>> dispatch_send_bytes((132,), None, sizes | {"SENDS": 8})
    {'bytes': 300941312}
    """
    read = args["width"] * args["unit_bytes"]
    scales = args["sf_units"] * args["sf_unit_bytes"]
    written = scales + (args["width"] if args["FP8"] else read)
    return {"bytes": args["num_tokens"] * (read + (0 if args["FP8"] else scales) + args["SENDS"] * written)}


def dispatch_slots_bytes(grid: object, metadata: Any, args: dict[str, Any]) -> dict[str, Any]:
    """x is read once, payload and scale factors written K times.

    >>> sizes = {"num_tokens": 128, "hidden": 7168, "FP8": True, "sf_bytes": 224, "K": 8}
    >>> dispatch_slots_bytes((128,), None, sizes)
    {'bytes': 9404416}
    """
    hidden = args["hidden"]
    written = args["sf_bytes"] + (hidden if args["FP8"] else 2 * hidden)
    return {"bytes": args["num_tokens"] * (2 * hidden + args["K"] * written)}


def combine_gather_bytes(grid: object, metadata: Any, args: dict[str, Any]) -> dict[str, Any]:
    """SENDS rows and the biases are read for a token, and one row is written.

    >>> combine_gather_bytes((128,), None, {"num_tokens": 128, "hidden": 7168, "SENDS": 8, "NUM_BIASES": 0})
    {'bytes': 16515072}
    """
    return {"bytes": args["num_tokens"] * 2 * args["hidden"] * (args["SENDS"] + args["NUM_BIASES"] + 1)}
