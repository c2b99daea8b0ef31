from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.flows import Flow, load_flow_from_entrypoint

from flows.settings import profile_folder
from klear_core.config.load import load_profile
from klear_core.config.pipeline import PipelineConfig
from klear_core.plan import select_stages, stages_of

ROOT = Path(__file__).parents[2]
DEPLOYMENTS: list[dict[str, Any]] = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda d: d["name"])
def test_every_deployment_points_to_a_flow_that_takes_its_parameters(deployment: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    flow = load_flow_from_entrypoint(deployment["entrypoint"])
    assert isinstance(flow, Flow)
    flow.validate_parameters(deployment["parameters"])


@pytest.mark.parametrize("deployment", [d for d in DEPLOYMENTS if d["entrypoint"].startswith("flows.stages.")], ids=lambda d: d["name"])
def test_the_profile_of_a_deployment_has_its_stage(deployment: dict[str, Any]):
    stages = stages_of(load_profile(profile_folder(deployment["parameters"]["profile"])))
    assert select_stages(stages, only=deployment["name"], from_=None, until=None)


def test_the_pipeline_each_stage_and_retraining_can_be_deployed():
    kinds = {s.kind for s in stages_of(PipelineConfig())}
    assert {d["name"] for d in DEPLOYMENTS} == {"pipeline", "retrain", "curate_rl", "rl_code", *kinds}


def test_retraining_is_scheduled_and_paused():
    (retrain,) = (d for d in DEPLOYMENTS if d["name"] == "retrain")
    assert [(s["cron"], s["active"]) for s in retrain["schedules"]] == [("0 3 * * 1", False)]


def test_the_form_shows_every_setting_with_its_bounds():
    flow = load_flow_from_entrypoint("flows.pipeline.pipeline")
    schema = flow._parameter_schema if hasattr(flow, "_parameter_schema") else flow.parameters
    definitions = schema.definitions
    assert definitions["PipelineConfig"]["properties"].keys() == PipelineConfig.model_fields.keys()
    assert definitions["SftOptimConfig"]["properties"]["lr"]["maximum"] == 1
    assert "learning rate" in definitions["SftOptimConfig"]["properties"]["lr"]["description"]


def test_a_partial_form_keeps_what_was_given_apart_from_defaults():
    flow = load_flow_from_entrypoint("flows.pipeline.pipeline")
    checked = flow.validate_parameters({"profile": "smoke", "settings": {"sft": {"num_epochs": 2}}})
    assert checked["settings"].model_dump(exclude_unset=True) == {"sft": {"num_epochs": 2}}


def test_the_automations_are_ones_that_prefect_understands():
    from prefect.events.schemas.automations import AutomationCore

    for automation in yaml.safe_load((ROOT / "infra" / "prefect" / "automations.yaml").read_text())["automations"]:
        assert AutomationCore.model_validate(automation).actions
