"""Launches for combine with LogFMT10, beside `engine`."""

from __future__ import annotations

import torch

from expertwire._math import ceil_div
from expertwire.kernels import logfmt
from expertwire.kernels.engine import DeviceEngine, Places, Step
from expertwire.kernels.tiles import pow2

WARPS = 4


def _chunk(hidden: int) -> int:
    return 1024 if hidden % 1024 == 0 else 512


def encode_rows(engine: DeviceEngine, y: torch.Tensor, memory: Places, step: Step) -> None:
    """The rows that a step filled, of y [rows, hidden] bfloat16, into `memory`, which peers read."""
    counts, offsets = engine.state.filled(step)
    sf = memory.sf(step.bank)
    assert sf is not None
    num_rows = y.numel() // engine.hidden
    engine.launch(
        logfmt.encode_rows, max(1, min(num_rows, engine.num_sms * (1 if engine.strict_sms else 8))),
        y.view(torch.int16), memory.payload(step.bank).view(torch.int16), sf.view(torch.int16), counts, offsets,
        num_rows,
        GROUPS=counts.numel(), GROUP_BINS=pow2(counts.numel()), hidden=engine.hidden, CHUNK=_chunk(engine.hidden),
        num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def combine_encoded(
    engine: DeviceEngine, memory: Places, step: Step, out: torch.Tensor, *, weighted: bool,
    biases: tuple[torch.Tensor, ...], publish: bool, finish: bool,
) -> None:  # fmt: skip
    """As `DeviceEngine.combine`, of rows that all ranks have encoded into `memory`."""
    bank, num_tokens, chunk = engine.state.banks[step.bank], out.shape[0], _chunk(engine.hidden)
    parts = ceil_div(engine.hidden, chunk)
    units = max(1, num_tokens * parts)
    engine.combine_ready(memory.payload(step.bank), memory, step, publish=publish)
    two = (*biases, None, None)[:2]
    engine.launch(
        logfmt.combine_logfmt, min(units, engine.num_sms) if engine.strict_sms else units,
        memory.bases[step.bank], step.sends_to, step.topk_weights if weighted else None, *two, out,
        step.void, step.refused, bank.words, bank.combine_epoch, bank.combine_ticket, bank.epoch, engine.state.status,
        engine.rank, num_tokens, engine.timeout_us, memory.region.sf,
        R=engine.num_ranks, RANKS=pow2(engine.num_ranks), SENDS=step.sends_to.shape[1], CHUNK=chunk, PARTS=parts,
        hidden=engine.hidden, WEIGHTED=weighted, NUM_BIASES=len(biases), FINISH=finish,
        num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
