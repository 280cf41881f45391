"""Settings that all ranks of a buffer share: where one rank's are illegal, or differ, it is an error on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from expertwire._check import Settings
from expertwire.errors import ExpertWireError, GroupMismatch, PeerRefused
from expertwire.transports.base import Bootstrap


def agree(ranks: Bootstrap, make: Callable[[], Settings]) -> Settings:
    """What `make` returns, which raises if this rank's are illegal. Collective.

    PeerRefused if a peer's are illegal, GroupMismatch if they differ.
    """
    mine, reason = None, ""
    error: Exception | None = None
    try:
        mine = make()
    except ExpertWireError as found:
        found.args = (f"rank {ranks.rank}: {found}",)
        error, reason = found, str(found)
    except Exception as found:  # noqa: BLE001  # raised below, once the peers know
        error, reason = found, f"rank {ranks.rank}: {found!r}"
    gathered: list[tuple[Settings | None, str]] = ranks.all_gather((mine, reason))
    if error is not None:
        raise error
    assert mine is not None
    refused = {rank: reason for rank, (_, reason) in enumerate(gathered) if reason}
    if refused:
        reasons = "; ".join(refused.values())
        raise PeerRefused(f"rank {ranks.rank}: no buffer was created, since a peer refused ({reasons})", list(refused))
    for field in fields(Settings):
        holders: dict[object, list[int]] = {}
        for rank, (settings, _) in enumerate(gathered):
            holders.setdefault(getattr(settings, field.name), []).append(rank)
        if len(holders) > 1:
            seen = "; ".join(f"{value} on rank(s) {ranks_of}" for value, ranks_of in holders.items())
            raise GroupMismatch(f"{field.name} must be equal on all ranks, got {seen}")
    return mine
