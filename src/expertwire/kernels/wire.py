"""Launches for combine with LogFMT10, beside `engine`."""

from __future__ import annotations

import torch

from expertwire._math import ceil_div
from expertwire.kernels import logfmt
from expertwire.kernels.engine import DeviceEngine, Places, Step
from expertwire.kernels.launch import Rest
from expertwire.kernels.tiles import pow2

WARPS = 4


def _chunk(hidden: int) -> int:
    return 1024 if hidden % 1024 == 0 else 512


def encode_rows(engine: DeviceEngine, y: torch.Tensor, meta: torch.Tensor, step: Step, memory: Places) -> None:
    """The rows that a step filled, of y [rows, hidden] bfloat16 with routing `meta`, into `memory` of their tokens'
    ranks."""
    lengths, offsets = engine.state.filled(step)
    groups, num_rows, num_places = lengths.numel(), y.numel() // engine.hidden, step.sends_to.shape[1]
    engine.launch(
        logfmt.encode_rows, max(1, min(num_rows, engine.num_sms * (1 if engine.strict_sms else 8))),
        (memory, step.bank, groups, num_places, meta.shape[1]),
        (y.view(torch.int16), meta, lengths, offsets, step.counts, num_rows),
        lambda: ((memory.bases[step.bank], memory.region.sf), {
            "R": engine.num_ranks, "GROUPS": groups, "GROUP_BINS": pow2(groups), "hidden": engine.hidden,
            "CHUNK": _chunk(engine.hidden), "SENDS": num_places, "META": meta.shape[1], "num_warps": WARPS,
            "enable_fp_fusion": False,
        }),
    )  # fmt: skip


def combine_encoded(
    engine: DeviceEngine, memory: Places, step: Step, out: torch.Tensor, *, weighted: bool,
    biases: tuple[torch.Tensor, ...], finish: bool,
) -> None:  # fmt: skip
    """As `DeviceEngine.combine`, of rows that all ranks have encoded into `memory`."""
    num_tokens, chunk = out.shape[0], _chunk(engine.hidden)
    parts = ceil_div(engine.hidden, chunk)
    units = max(1, num_tokens * parts)
    weights, two = step.topk_weights if weighted else None, (*biases, None, None)[:2]

    def rest() -> Rest:
        return (memory.payload(step.bank), memory.sf(step.bank), *engine.words_of_combine(step.bank)), {
            "R": engine.num_ranks, "RANKS": pow2(engine.num_ranks), "BANKS": engine.state.num_banks,
            "SENDS": step.sends_to.shape[1], "CHUNK": chunk,
            "PARTS": parts, "hidden": engine.hidden, "WEIGHTED": weighted, "NUM_BIASES": len(biases), "FINISH": finish,
            "num_warps": WARPS, "enable_fp_fusion": False,
        }  # fmt: skip

    engine.launch(
        logfmt.combine_logfmt, min(units, engine.num_sms) if engine.strict_sms else units,
        (memory, step.bank, weighted, len(biases), finish),
        (step.sends_to, weights, *two, out, step.counts, num_tokens, engine.state.timeout_us), rest,
    )  # fmt: skip
