"""`klear champion` and `klear rollback`."""

from __future__ import annotations

from pathlib import Path

import pytest
from klear_command import Klear

from flows.compare import gate_evaluations
from klear_core.config.pipeline import PromoteConfig, WorkspaceConfig
from klear_core.errors import ConfigError
from klear_core.evaluate.compare.promotion import DECISION_FILE, Check, Contender, Decision
from tasks.model_registry import Promotion, open_registry


@pytest.fixture(autouse=True)
def _no_tracking_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def promotion(model: str, over: int | None, decision: Path) -> Promotion:
    return Promotion(
        model=f"rl/{model}",
        model_uri=f"file:///models/{model}",
        evaluation=f"evaluate/{model}",
        evaluation_uri=f"file:///scores/{model}",
        decision=f"promote/{model}",
        decision_uri=decision.as_uri(),
        run="r1",
        over=over,
    )


def write_decision(folder: Path) -> None:
    folder.mkdir()
    decision = Decision(
        is_passed=True,
        sentence="rl b becomes champion",
        candidate=Contender(model="rl/b", evaluation="evaluate/b", run="r1"),
        rival=None,
        rival_is="nobody",
        rule=PromoteConfig(),
        checks=(Check(rule="better", is_passed=True, text="a gain is shown on aime24 +3.1 points"),),
        comparisons=(),
        shared=(),
    )
    (folder / DECISION_FILE).write_text(decision.model_dump_json())


def test_without_a_registry_both_commands_refuse_and_make_none(klear: Klear, tmp_path: Path) -> None:
    for command in (["champion"], ["rollback", "--why", "x"]):
        ended = klear(*command, "--root", tmp_path)
        assert ended.status == 2
        assert "no such database, so 'klear' has no champion" in ended.err
    assert list(tmp_path.iterdir()) == []
    assert "a reason is needed" in klear("rollback", "--why", " ", "--root", tmp_path).err


def test_the_champion_is_shown_with_its_evidence_and_rolled_back_for_a_reason(klear: Klear, tracked: Path) -> None:
    ended = klear("champion", "--root", tracked)
    assert ended.status == 2
    assert "'klear' has no champion: a run whose profile has [promote]" in ended.err
    registry = open_registry(WorkspaceConfig(root=str(tracked)), "klear")
    decision = tracked / "decision"
    write_decision(decision)
    assert registry.promote(promotion("a", None, tracked / "gone"))
    assert registry.promote(promotion("b", 1, decision))

    shown = klear("champion", "--root", tracked).out
    assert "klear, version 2" in shown
    assert "/models/b" in shown
    assert "✓ better: a gain is shown on aime24 +3.1 points" in shown

    ended = klear("rollback", "--why", "rude", "--by", "ann", "--root", tracked)
    assert ended.status == 0, ended.err
    assert "version 1 (rl a) is champion of 'klear' again; version 2 (rl b) was rolled back" in ended.out
    shown = klear("champion", "--root", tracked).out
    assert "klear, version 1" in shown
    assert "the evidence is gone" in shown
    assert "rolled back to version 1 by ann at 20" in shown

    ended = klear("rollback", "--why", "again", "--root", tracked)
    assert ended.status == 2
    assert "has no former champion to go back to: it was the first" in ended.err


def test_a_gate_on_an_evaluation_that_is_not_there_fails_nobody_and_spends_no_look(tmp_path: Path) -> None:
    """A ConfigError ends with status 2; 1 would say that the model failed."""
    policy = tmp_path / "gate.toml"
    policy.write_text("looks = [0.5, 1]\n")
    with pytest.raises(ConfigError, match="sft"):
        gate_evaluations("sft", "rl", policy, is_json=False, root=tmp_path / "runs")
    assert not (tmp_path / "runs" / "gates").exists()
