"""docs/memory-model.md shows what the code says."""

from pathlib import Path

import pytest
from test_models_protocols import SOUND, SOUND_BARRIER

from expertwire.cli import models
from expertwire.cli.main import run
from expertwire.ordering import profiles, report

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "memory-model.md").read_text("utf-8")


@pytest.mark.parametrize("table", [report.profile_table, report.knob_table, report.cost_table])
def test_tables_are_current(table):
    assert table() in TEXT


def test_matrices_are_the_tested_ones():
    matrices = (
        TEXT.split("## Which signal holds where")[1].split("### What a signal costs")[0].split("| profile | write")[1:]
    )
    for expected, block in zip((SOUND, SOUND_BARRIER), matrices, strict=True):
        rows = [line.strip("|").split("|") for line in block.splitlines() if line.startswith(("| `", " |"))]
        heads = ("write" + block.splitlines()[0]).strip(" |").split(" | ")
        found = {
            cells[0].strip(" `"): {h for h, c in zip(heads, cells[1:], strict=True) if c.strip() == "holds"}
            for cells in rows
            if cells[0].strip().startswith("`")
        }
        assert {name: holds for name, holds in found.items() if holds} == expected


def test_traces_are_current():
    for mechanism, name in (("write", "rc.spec"), ("atomic", "rc.ro_pcieatomic")):
        timeline = models.check(models.get("dispatch"), mechanism, profiles.get(name)).trace.timeline()
        assert "\n".join(line.rstrip() for line in timeline.splitlines()) in TEXT


def test_the_soak_that_is_shown_is_current(capsys):
    command = "soak --profile rc.spec --signal write"
    assert run(command.split()) == 1
    lines = capsys.readouterr().out.splitlines()
    shown = TEXT.split(f"$ expertwire {command}\n")[1].split("```")[0]
    assert " ".join(shown.split()) == f"{lines[0]} ... {lines[-1]}"


def test_every_model_is_on_the_protocol_page():
    text = (DOCS / "protocol.md").read_text("utf-8")
    assert [name for name in models.MODELS if f"`{name}`" not in text.split("## Signal words")[0]] == []


def test_what_protocol_page_names_exists():
    text = (DOCS / "protocol.md").read_text("utf-8")
    for name in ("protocols/lane.py", "protocols/barrier.py", "ordering/deepep.py", "cli/models.py"):
        assert name in text
        assert (DOCS.parent / "src/expertwire" / name).exists()
