"""Results as tables: plain data for `--json`, Markdown for the documentation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from expertwire.ordering import profiles, signals
from expertwire.ordering.events import Numbering, events_of
from expertwire.ordering.explore import Result, Verdict
from expertwire.ordering.profiles import KNOBS, Profile
from expertwire.ordering.verbs import Atomic, Loc, Queue, Read, Write


@dataclass(frozen=True, slots=True)
class Cell:
    """One check: a model with a signal mechanism on a profile."""

    model: str
    signal: str
    profile: str
    verdict: str
    violation: str
    states: int
    seconds: float
    trace_id: str
    cost: str

    @property
    def holds(self) -> bool:
        return self.verdict == Verdict.HOLDS

    @property
    def undecided(self) -> bool:
        """Neither proved nor refuted. A complete exploration that missed a goal is decided: the model is at fault."""
        return self.verdict == Verdict.BOUND and not self.violation

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def cell(model: str, signal: str, profile: Profile, result: Result) -> Cell:
    """The summary of a result. An exploration that missed a goal does not count as held."""
    verdict, trace = result.verdict.value, result.trace
    violation = trace.violation.kind if trace and trace.violation else ""
    if result.verdict is Verdict.HOLDS and result.missing:
        verdict, violation = Verdict.BOUND.value, f"never reached: {', '.join(result.missing)}"
    price = "" if profile.machine == "ptx" else str(signals.cost(signals.get(signal), profile))
    return Cell(
        model, signal, profile.name, verdict, violation, result.states, round(result.seconds, 4),
        trace.id if trace else "", price,
    )  # fmt: skip


def markdown(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table.

    >>> print(markdown(["a", "b"], [[1, 2]]))
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    lines += ["| " + " | ".join(str(value) for value in row) + " |" for row in rows]
    return "\n".join(lines)


def profile_table() -> str:
    """Every profile with its source and the knobs that differ from rc.spec."""
    base = profiles.get("rc.spec")
    rows = []
    for profile in profiles.PROFILES.values():
        differs = [f"{k}={getattr(profile, k)}" for k in KNOBS if getattr(profile, k) != getattr(base, k)]
        what = "its own machine (views)" if profile.machine == "ptx" else ", ".join(differs) or "the base"
        rows.append([f"`{profile.name}`", profile.source, what])
    return markdown(["profile", "source", "knobs that differ from `rc.spec`"], rows)


def knob_table() -> str:
    """Every knob, what it means and where that comes from."""
    return markdown(["knob", "meaning and source"], [[f"`{knob}`", text] for knob, text in KNOBS.items()])


def matrix_table(cells: Sequence[Cell], model: str) -> str:
    """Profiles x mechanisms for one model."""
    chosen = {(c.profile, c.signal): c for c in cells if c.model == model}
    columns = [m for m in signals.MECHANISMS if any(signal == m for _, signal in chosen)]
    rows = []
    for profile in dict.fromkeys(p for p, _ in chosen):
        marks = [mark(chosen.get((profile, column))) for column in columns]
        rows.append([f"`{profile}`", *marks])
    return markdown(["profile", *columns], rows)


SHORT = {
    "stale read": "stale",
    "bank reused too early": "reuse",
    "wrong count": "count",
    "lost signal": "lost",
    "deadlock": "hang",
}


def mark(found: Cell | None) -> str:
    """A cell as one word: holds, bound, or what fails."""
    if found is None:
        return ""
    if found.verdict == Verdict.FAILS:
        return SHORT.get(found.violation, found.violation)
    return "holds" if found.holds else "bound"


def cost_table() -> str:
    """What each mechanism costs, on a network that keeps order and on one that does not."""
    rows = []
    for mechanism in signals.MECHANISMS.values():
        if mechanism.suits(profiles.get("ptx")):
            continue
        home = next(p for p in profiles.PROFILES.values() if mechanism.suits(p))
        price = signals.cost(mechanism, home)
        ooo = signals.cost(mechanism, profiles.get("rc.ooo")).round_trips if not home.order_puts else price.round_trips
        trips = str(price.round_trips) if ooo == price.round_trips else f"{price.round_trips} (rc.ooo: {ooo})"
        rows.append([mechanism.name, mechanism.text, trips, price.packets, price.bytes, *price.completions])
    heads = [
        "signal",
        "what it does",
        "extra round trips",
        "packets",
        "bytes",
        "CQEs at the writer",
        "CQEs at the reader",
    ]
    return markdown(heads, rows)


def stamp_table(profile: Profile) -> dict[tuple[str, str], bool]:
    """For pairs of operations on one queue: is the first one placed before the second one takes effect?"""
    queue = Queue()
    kinds: dict[str, Any] = {
        "WRITE": Write(queue, (Loc("B", "x"),), (1,)),
        "READ": Read(queue, Loc("B", "x"), Loc("A", "r")),
        "ATOMIC": Atomic(queue, Loc("B", "x")),
    }
    found = {}
    for first, one in kinds.items():
        for second, two in kinds.items():
            number = Numbering()
            a = events_of(profile, one, "A", 0, [], 0, number)
            b = events_of(profile, two, "A", 0, [a], 0, number)
            effect = b.places or b.returns
            closure, work = 0, [e for e in b.events if e.bit & effect]
            while work:
                event = work.pop()
                if not closure & event.bit:
                    closure |= event.bit
                    work += [e for e in number.events if e.bit & event.after]
            queued = profile.place_ww == "fifo_nic" and "READ" not in (first, second)
            found[first, second] = bool((a.places or a.returns) & closure or (queued and a.accepts & closure))
    return found
