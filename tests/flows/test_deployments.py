from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.flows import Flow, load_flow_from_entrypoint

from flows.environment import profile_folder, resolve
from flows.pipeline import label_of
from flows.sweep import SILENT_S
from klear_core.config.curate import CurateConfig, TagConfig
from klear_core.config.data import BenchmarkConfig, ProceduralSource
from klear_core.config.load import load_profile
from klear_core.config.pipeline import PipelineConfig, PromoteConfig
from klear_core.config.rl import RlConfig
from klear_core.errors import ConfigError
from klear_core.pipeline.graph import select_stages, stages_of

ROOT = Path(__file__).parents[2]
DEPLOYMENTS: list[dict[str, Any]] = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda d: d["name"])
def test_every_deployment_points_to_a_flow_that_takes_its_parameters(
    deployment: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(ROOT)
    flow = load_flow_from_entrypoint(deployment["entrypoint"])
    assert isinstance(flow, Flow)
    flow.validate_parameters(deployment["parameters"])


STAGES_ALONE = {d["name"]: d["parameters"] for d in DEPLOYMENTS if "only" in d["parameters"]}


@pytest.mark.parametrize("name", STAGES_ALONE)
def test_the_deployment_of_a_stage_runs_that_stage_of_a_profile_that_has_it(name: str):
    parameters = STAGES_ALONE[name]
    stages = stages_of(load_profile(profile_folder(parameters["profile"]), parameters.get("overrides", [])))
    assert parameters["only"] == name
    assert select_stages(stages, only=name, from_=None, until=None)


def test_every_stage_can_be_deployed_alone_and_the_evaluations_together():
    every_stage = stages_of(
        PipelineConfig(
            benchmarks=(BenchmarkConfig(name="b", source=ProceduralSource()),),
            curate_rl=CurateConfig(),
            tag=TagConfig(),
            tag_rl=TagConfig(),
            rl_code=RlConfig(),
            promote=PromoteConfig(),
        )
    )
    assert STAGES_ALONE.keys() == {stage.section for stage in every_stage}
    assert {d["name"] for d in DEPLOYMENTS} - STAGES_ALONE.keys() == {"pipeline", "retrain", "retrain-and-promote"}


def test_retraining_is_scheduled_and_paused():
    scheduled = {d["name"]: [(s["cron"], s["active"]) for s in d["schedules"]] for d in DEPLOYMENTS if "schedules" in d}
    assert scheduled == {"retrain": [("0 3 * * 1", False)], "retrain-and-promote": [("0 3 * * 2", False)]}


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


def test_runs_of_deployments_have_what_lets_them_live_through_an_outage():
    for deployment in DEPLOYMENTS:
        environment = deployment["work_pool"]["job_variables"]["env"]
        assert (
            2 ** (int(environment["PREFECT_CLIENT_MAX_RETRIES"]) + 1) - 2 >= 300
        )  # seconds for which a request is tried
        assert 3 * int(environment["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"]) <= SILENT_S
        assert "concurrency_limit" not in deployment  # a lease, which a server can lose; the pool's limit is none


@pytest.mark.parametrize(
    "given", [{"profile": "no-such"}, {"overrides": ["no.such=1"]}, {"profile": "smoke", "overrides": ["seed=x"]}]
)
def test_a_run_whose_parameters_do_not_resolve_has_a_name_for_the_flow_to_fail_under(given: dict[str, Any]):
    def config() -> PipelineConfig:
        return resolve(given.get("profile", "laptop"), given.get("overrides", []), None)

    with pytest.raises(ConfigError):
        config()
    assert label_of(config, prefix="retrain") == "retrain-unresolved"
    assert label_of(config, prefix="") == "unresolved"
    assert label_of(config, prefix="", profile="smoke") == "smoke-unresolved"
