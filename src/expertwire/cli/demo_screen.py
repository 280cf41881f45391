"""What the demo shows while it trains: a live screen on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

_BLOCKS = "▁▂▃▄▅▆▇█"
_PLAIN_LINES = 10
_COLD, _HOT = (24, 40, 72), (255, 176, 32)


class Progression:
    """What the records so far say about one run; a step counts when all ranks have reported it."""

    def __init__(self, num_reporters: int, num_ranks: int, steps: int, tokens_per_rank: int) -> None:
        self.num_ranks, self.steps = num_ranks, steps
        self.losses: list[float] = []
        self.load: list[list[int]] = []
        self._tokens_per_step = num_ranks * tokens_per_rank
        self._num_reporters = num_reporters
        self._open: dict[int, list[dict[str, Any]]] = {}
        self._latest: dict[int, dict[str, Any]] = {}

    def add(self, record: dict[str, Any]) -> bool:
        """True if the record completes a step."""
        self._latest[record["rank"]] = record
        of_step = self._open.setdefault(record["step"], [])
        of_step.append(record)
        if len(of_step) < self._num_reporters:
            return False
        del self._open[record["step"]]
        self.losses.append(sum(r["loss"] for r in of_step) / self._num_reporters)
        if "load" in record:
            self.load = [
                [sum(of_expert) for of_expert in zip(*of_layer, strict=True)]
                for of_layer in zip(*(r["load"] for r in of_step), strict=True)
            ]
        return True

    @property
    def done(self) -> int:
        return len(self.losses)

    @property
    def tokens(self) -> int:
        return self.done * self._tokens_per_step

    def total(self, field: str) -> float:
        return float(sum(record[field] for record in self._latest.values()))

    def facts(self) -> list[tuple[str, str]]:
        """Label and value of what was moved, and how long the calls took."""
        if not self.done or not self.load:
            return []
        per_step = 1e3 / (self.num_ranks * self.done)
        waiting = self.total("wait_s") * per_step
        times = [f"{name} {self.total(f'{name}_s') * per_step:.1f} ms" for name in ("dispatch", "combine")]
        rows, megabytes = int(self.total("rows")), self.total("num_bytes") / 1e6
        return [
            (
                "moved",
                f"{self.tokens:,} tokens trained, {rows:,} rows dispatched, {megabytes:,.0f} MB sent, with backward",
            ),
            ("step, per rank", f"{', '.join(times)} (forward); waiting for peers {waiting:.1f} ms (all)"),
        ]


class Screen:
    """Follows one run at a time. On a terminal everything is redrawn in place; else about ten lines per run."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=8) if _can_redraw(console) else None
        self._progress = Progress(
            TextColumn("[bold]{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(), console=console,
        )  # fmt: skip
        self._bars: list[TaskID] = []
        self._trained: Progression | None = None
        self._shown: Progression | None = None

    def begin(self, title: str, progression: Progression | None = None) -> None:
        """A new phase; without a progression its length is unknown."""
        if self._live is None and self._shown is not None:
            self._print_facts(self._shown)
        self._shown = progression
        if progression is not None and self._trained is None:
            self._trained = progression
        if self._live is None:
            say(self._console, title)
            return
        for bar in self._bars:
            self._progress.stop_task(bar)
            if self._progress.tasks[bar].total is None:
                self._progress.update(bar, total=1, completed=1)
        self._bars.append(self._progress.add_task(title, total=progression.steps if progression else None, count=""))
        self._live.update(self._picture())

    def on_record(self, record: dict[str, Any]) -> None:
        shown = self._shown
        if shown is None or not shown.add(record):
            return
        if self._live is not None:
            self._progress.update(self._bars[-1], completed=shown.done, count=f"{shown.done}/{shown.steps}")
            self._live.update(self._picture())
        elif shown.done % max(1, shown.steps // _PLAIN_LINES) == 0 or shown.done == shown.steps:
            say(self._console, f"  step {shown.done:4} of {shown.steps}  loss {shown.losses[-1]:.4f}")

    def _print_facts(self, trained: Progression) -> None:
        for label, value in trained.facts():
            say(self._console, f"  {label}: {value}")
        for layer, counts in enumerate(trained.load):
            numbers = " ".join(map(str, counts))
            say(self._console, f"  experts, layer {layer}: {numbers} selections in the last step")

    def _picture(self) -> Group:
        parts: list[Any] = [self._progress]
        if self._trained is not None and self._trained.done:
            parts.append(Panel(_body(self._trained, self._console.width - 4), title="training", title_align="left"))
        return Group(*parts)

    def __enter__(self) -> Screen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            for bar in self._bars:
                self._progress.stop_task(bar)
            self._live.stop()


def say(console: Console, text: str, style: str = "") -> None:
    """A paragraph: wrapped on a terminal, one line elsewhere."""
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=not console.is_terminal)


def _can_redraw(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal


def _body(trained: Progression, width: int) -> Table:
    body = Table.grid(padding=(0, 2))
    body.add_column(style="dim", no_wrap=True)
    body.add_column()
    body.add_row("loss", Text.assemble((f"{trained.losses[-1]:.4f}  ", "bold"), _curve(trained.losses, width - 30)))
    for layer, counts in enumerate(trained.load):
        body.add_row(f"experts, layer {layer} (%)", _heat(counts, trained.num_ranks))
    for label, value in trained.facts():
        body.add_row(label, value)
    return body


def _curve(values: Sequence[float], width: int) -> str:
    """Block characters, one for every few values, low to high."""
    stride = -(-len(values) // max(1, width))
    means = [sum(part) / len(part) for part in (values[i : i + stride] for i in range(0, len(values), stride))]
    low, high = min(means), max(means)
    return "".join(_BLOCKS[int((v - low) / (high - low or 1) * (len(_BLOCKS) - 1))] for v in means)


def _heat(counts: Sequence[int], num_ranks: int) -> Text:
    """One cell per expert with its share of the selections in percent, warmer for more; a gap between ranks."""
    share, extra = divmod(len(counts), num_ranks)
    first_of_rank = {r * share + min(r, extra) for r in range(1, num_ranks)}
    total, fair, text = max(1, sum(counts)), 1 / len(counts), Text()
    for expert, count in enumerate(counts):
        if expert in first_of_rank:
            text.append(" ")
        warmth = min(1.0, count / total / (3 * fair))
        colour = ",".join(str(round(cold + warmth * (hot - cold))) for cold, hot in zip(_COLD, _HOT, strict=True))
        text.append(f"{100 * count / total:3.0f} ", style=f"{'black' if warmth > 0.5 else 'white'} on rgb({colour})")
    return text
