"""`expertwire check --weakest`: the promises that a protocol needs of a transport."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from expertwire.cli import models
from expertwire.cli.jobs import progress_bar
from expertwire.errors import InvalidArgument
from expertwire.ordering import profiles, signals
from expertwire.ordering.explore import Verdict
from expertwire.ordering.profiles import Profile
from expertwire.ordering.weakest import needs, weakest_of


@dataclass(slots=True)
class _Probe:
    """Whether a model holds with a mechanism; counts states."""

    model: models.Model
    mechanism: str
    on_states: Callable[[int], None]

    def __call__(self, profile: Profile) -> bool:
        try:
            result = models.check(self.model, self.mechanism, profile)
        except InvalidArgument:  # the mechanism does not exist there
            return False
        self.on_states(result.states)
        return result.verdict is Verdict.HOLDS


def find_weakest(
    model: models.Model, mechanisms: list[str], known: list[Profile], on_progress: Callable[[int, int], None]
) -> list[dict[str, Any]]:
    """Per mechanism: the weakest profiles on which the protocol holds, and the promises that it needs of each."""
    found: list[dict[str, Any]] = []
    total = 0
    for done, mechanism in enumerate(mechanisms):

        def count(states: int, done: int = done) -> None:
            nonlocal total
            total += states
            on_progress(done, total)

        holds = _Probe(model, mechanism, count)
        weakest = weakest_of([p for p in known if signals.get(mechanism).suits(p) and holds(p)])
        found += [{"signal": mechanism, "profile": p.name, "needs": needs(p, holds).needed} for p in weakest]
    return found


def show_weakest(name: str, signal: str | None, profile: str | None, as_json: bool) -> None:
    """Print what `find_weakest` finds."""
    model = models.get(name)  # wrong names are refused before a bar is drawn
    mechanisms = [signals.get(signal).name] if signal else list(signals.MECHANISMS)
    known = [profiles.get(profile)] if profile else [p for p in profiles.PROFILES.values() if p.machine == "network"]
    with progress_bar(len(mechanisms), f"weakest profiles for {name}", as_json) as update:
        found = find_weakest(model, mechanisms, known, update)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    table = Table(title=f"{name}: the weakest profiles on which it holds, and what it needs there")
    for heading in ("signal", "weakest profile", "needs"):
        table.add_column(heading, overflow="fold")
    for row in found:
        promises = ", ".join(f"{k}={v}" for k, v in row["needs"].items()) or "nothing beyond an operation's own order"
        table.add_row(row["signal"], row["profile"], promises)
    Console(highlight=False).print(table)
