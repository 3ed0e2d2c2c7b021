"""``replayinfer bench --plan``: its rows, and that the plans it times are real ones."""

import json

import pytest
import torch

from replayinfer.bench import plan as bench
from replayinfer.planner import HostPlanner


@pytest.fixture
def quick(monkeypatch):
    whole = bench.bench_plans
    monkeypatch.setattr(bench, "SEQUENCES", (3, 40))
    return lambda **options: whole(steps=2, **options)


def test_rows(quick, monkeypatch):
    seen = []
    plan = HostPlanner.plan

    def noted(self, *args, **options):
        seen.append(plan(self, *args, **options))
        return seen[-1]

    monkeypatch.setattr(HostPlanner, "plan", noted)
    report = quick(policy="spread")
    host = [row for row in report.rows if row.path == "host"]
    assert [row.sequences for row in host] == [3, 40]
    assert all(row.us > 0 for row in host)
    # Histories are staggered: about one in sixteen folds a step, and none waits.
    folds = [p.fold_count for p in seen if p.batch == 40][-18:]
    assert sum(folds) >= 40
    assert max(folds) <= 6
    device = [row for row in report.rows if row.path == "device"]
    assert [row.sequences for row in device] == ([3, 40] if torch.cuda.is_available() else [])


def test_the_command_prints_one_object(quick, monkeypatch, capsys):
    pytest.importorskip("typer")
    from replayinfer.cli.app import run

    monkeypatch.setattr("replayinfer.cli.bench.bench_plans", quick)
    assert run(["bench", "--plan", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["policy"] == "full"
    for row in printed["rows"]:
        assert set(row) == {"path", "sequences", "us"}
        assert row["path"] in ("host", "device")
    assert run(["bench", "--plan"]) == 0
    assert "host" in capsys.readouterr().out
