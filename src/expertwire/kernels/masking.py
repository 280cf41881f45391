"""What changes on a device when ranks are masked: tables that kernels read. Kernels and graphs stay as they are."""

from __future__ import annotations

import torch

from expertwire.kernels.routing import HOME_RANK, WHERE_RANK
from expertwire.kernels.state import DeviceState, Step
from expertwire.layouts.device_window import LINE_BYTES
from expertwire.layouts.receive import Layout
from expertwire.protocols.epoch_signal import pack

_FOREVER = 1 << 38  # a step that no rank comes to


def newest_step(state: DeviceState) -> int:
    """The largest number of a step in any bank."""
    return int(torch.cat([state.combines, *(bank.epoch for bank in state.banks)]).max())


def restart(state: DeviceState, masked: set[int], step: int) -> None:
    """Every bank stands as after step number `step`, with nothing in flight, and the ranks in `masked` are left behind:
    their words have come for all time, with no rows; there is no address to signal to; their experts have no places.
    Nothing of any rank that is left may be running."""
    window, state.masked = state.window, masked
    state.owner_start[_served_by(state, state.by_owner, masked)] = -1
    words = state.own[: window.words_bytes * state.num_banks].view(torch.int64)
    words = words.view(state.num_banks, -1, state.num_ranks, LINE_BYTES // 8)[..., 0]
    words.fill_(pack(step, 0))
    for number, bank in enumerate(state.banks):
        counts = state.own[window.counts(number) :].view(torch.int32)[: state.num_ranks * window.counts_row]
        for rank in masked:
            words[number, :, rank] = pack(_FOREVER, 0)
            counts.view(state.num_ranks, -1)[rank].zero_()
            for table in (bank.words, bank.counts, state.sources):
                table[rank] = 0
        bank.epoch.fill_(step)
        bank.ticket.zero_()
    state.combines.fill_(step)
    state.combine_tickets.zero_()
    for record in (state.status, state.mirror, state.news):
        record.zero_()
    if state.device.type == "cuda":
        torch.cuda.current_stream(state.device).synchronize()


def forget(step: Step, meta: torch.Tensor, masked: set[int]) -> None:
    """An old plan no longer has places on these ranks, and no rows from them: a captured graph may repeat it."""
    sends_to = step.sends_to.tensor()
    for rank in masked:
        sends_to.masked_fill_(sends_to >> WHERE_RANK.value == rank, -1)
        meta[:, 0].masked_fill_(meta[:, 0] == rank, -1)


def num_missing(state: DeviceState, step: Step, masked: tuple[int, ...], *, by_rank: bool) -> torch.Tensor:
    """How many selections of a step were of experts of these ranks; `by_rank`, and in COMPACT, each rank once for a
    token."""
    ids = step.topk_idx.sort(1).values
    legal = (ids >= 0) & (ids < state.num_experts)
    if step.layout is Layout.EXPERT_SLOTS:  # where repeats do not count
        legal[:, 1:] &= ids[:, 1:] != ids[:, :-1]
    known = ids.clamp(0, state.num_experts - 1)
    found = torch.stack([legal & _served_by(state, known, {rank}) for rank in masked])
    return (found.any(2) if by_rank or step.layout is Layout.COMPACT else found).sum()


def _served_by(state: DeviceState, experts: torch.Tensor, ranks: set[int]) -> torch.Tensor:
    """Whether each expert belongs to one of these ranks."""
    owners = state.home[experts.long()] >> HOME_RANK.value
    return torch.isin(owners, state.int32(sorted(ranks)))
