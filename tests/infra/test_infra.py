"""Holds the files of infra/ against the code, the locks and the programs that they name."""

from __future__ import annotations

import configparser
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from object_server import object_server
from typer.main import get_command

from flows.cli import app

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "infra" / "compose"
HELM = ROOT / "infra" / "helm"
UNITS = sorted((ROOT / "infra" / "systemd").glob("*.service"))
PROGRAMS = Path(sys.prefix) / "bin"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@cache
def compose() -> dict[str, Any]:
    return yaml.safe_load((COMPOSE / "compose.yaml").read_text())


def services() -> dict[str, dict[str, Any]]:
    return compose()["services"]


def commands_of_services() -> Iterator[tuple[str, list[str]]]:
    for name, service in services().items():
        command = service.get("command", [])
        lines = command[2].splitlines() if command[:2] == ["sh", "-ec"] else [shlex.join(command)]
        yield from ((name, shlex.split(line.removeprefix("exec "))) for line in lines if line)


def commands_of_units() -> Iterator[tuple[str, list[str]]]:
    for unit in UNITS:
        for line in re.findall(r"^ExecStart(?:Pre)?=(.*)$", unit.read_text(), re.MULTILINE):
            program, *arguments = shlex.split(line)
            yield unit.stem, [Path(program).name, *arguments]


def environments() -> Iterator[tuple[str, str]]:
    for name, service in services().items():
        yield from ((name, variable) for variable in service.get("environment", {}))
    for unit in UNITS:
        line = re.search(r"^Environment=(.*)$", unit.read_text(), re.MULTILINE)
        assert line is not None
        yield from ((unit.stem, part.partition("=")[0]) for part in shlex.split(line[1]))


def test_services_and_units_run_programs_that_are_installed_and_commands_of_klear():
    ours = get_command(app).commands
    in_its_own_image = {name for name, service in services().items() if service["image"] != "${KLEAR_IMAGE}"}
    seen = set()
    for name, (program, *arguments) in (*commands_of_services(), *commands_of_units()):
        if name in in_its_own_image:
            continue
        seen.add(program)
        assert (PROGRAMS / program).exists(), f"{name}: {program}"
        if program == "klear":
            options = {option for each in ours[arguments[0]].params for option in each.opts}
            assert {each for each in arguments[1:] if each.startswith("--")} <= options, name
    assert seen == {"klear", "prefect", "mlflow", "ray", "python"}


def test_variables_of_prefect_and_mlflow_are_settings_of_theirs():
    from prefect.settings import Settings
    from prefect.settings.legacy import _get_settings_fields

    (mlflow,) = importlib.util.find_spec("mlflow").submodule_search_locations
    of_mlflow = (Path(mlflow) / "environment_variables.py").read_text()  # its import takes seconds
    of_prefect = set(_get_settings_fields(Settings)) | {"PREFECT_REDIS_MESSAGING_URL"}  # of prefect-redis 0.3
    for name, variable in environments():
        if variable.startswith("PREFECT_"):
            assert variable in of_prefect, f"{name}: {variable}"
        elif variable.startswith("MLFLOW_"):
            assert re.search(rf"^{variable} = ", of_mlflow, re.MULTILINE), f"{name}: {variable}"


def test_all_processes_of_prefects_server_share_every_state():
    for name in ("prefect-1", "prefect-2", "prefect-services"):
        settings = services()[name]["environment"]
        assert settings["PREFECT_SERVER_DATABASE_CONNECTION_URL"].startswith("postgresql+asyncpg://"), name
        assert settings["PREFECT_SERVER_DATABASE_MIGRATE_ON_START"] == "false"
        for part, module in {
            "EVENTS_MESSAGING_BROKER": "messaging",
            "EVENTS_MESSAGING_CACHE": "messaging",
            "EVENTS_CAUSAL_ORDERING": "ordering",
            "CONCURRENCY_LEASE_STORAGE": "lease_storage",
        }.items():
            assert settings[f"PREFECT_SERVER_{part}"] == f"prefect_redis.{module}", name
        assert settings["PREFECT_SERVER_DOCKET_URL"].startswith("redis://"), name
    assert "--no-services" in services()["prefect-1"]["command"]


def test_only_the_three_pages_are_published_and_only_on_loopback():
    published = {name: service["ports"] for name, service in services().items() if "ports" in service}
    assert published == {
        "proxy": ["127.0.0.1:4200:4200"],
        "mlflow": ["127.0.0.1:5000:5000"],
        "ray-head": ["127.0.0.1:8265:8265"],
    }


def test_env_example_names_the_variables_that_compose_reads_and_holds_no_secret():
    text = (COMPOSE / "compose.yaml").read_text()
    lines = (COMPOSE / ".env.example").read_text().splitlines()
    example = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    assert set(re.findall(r"\$\{(\w+)", text)) == set(example)
    assert {name for name, value in example.items() if value} == {"KLEAR_IMAGE", "BACKUP_FOLDER"}


def test_a_service_waits_only_for_what_exists_and_can_be_ready():
    for name, service in services().items():
        for other, how in service.get("depends_on", {}).items():
            needed = services()[other]
            if how["condition"] == "service_healthy":
                assert "healthcheck" in needed, f"{name} waits for {other}"
            else:
                assert needed["restart"] == "no", f"{name} waits for the end of {other}"
    mounted = {v.split(":")[0] for service in services().values() for v in service.get("volumes", ())}
    assert {v for v in mounted if not v.startswith((".", "$"))} == set(compose()["volumes"])


def test_api_servers_are_healthy_only_when_ready_and_the_proxy_asks_them_the_same():
    assert services()["prefect-1"]["healthcheck"]["test"][-1].endswith("/api/ready")
    assert "health_uri /api/ready" in (COMPOSE / "Caddyfile").read_text()


def test_a_backup_leaves_out_what_a_run_deletes_meanwhile_and_a_broken_one_can_be_repeated(tmp_path, monkeypatch):
    (tmp_path / "pg_dump").write_text("#!/bin/sh\n[ -f works ] || { touch works; exit 1; }\n")
    (tmp_path / "pg_dump").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.chdir(tmp_path)
    for name in ("history/one", "history/two", "artifacts/.building/sft"):
        (tmp_path / "runs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "runs" / name).touch()
    with object_server("klear"):
        spec = importlib.util.spec_from_file_location("backup", COMPOSE / "backup.py")
        backup = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(backup)
        store = backup.s3fs.S3FileSystem()  # there is one for an environment
        store.pipe({"klear/one": b"1", "klear/two": b"2"})
        copy, add = store.get_file, tarfile.TarFile.add

        def copy_one(key: str, file: Path) -> None:
            copy(key, file)
            store.rm({"klear/one", "klear/two"}.difference([key]).pop())

        def add_one(out: tarfile.TarFile, path: Path, **options: object) -> None:
            add(out, path, **options)
            for other in {"one", "two"}.difference([Path(path).name]) if Path(path).is_file() else ():
                Path(path).with_name(other).unlink()

        monkeypatch.setattr(store, "get_file", copy_one)
        monkeypatch.setattr(tarfile.TarFile, "add", add_one)
        with pytest.raises(subprocess.CalledProcessError):
            backup.save(tmp_path / "saved")
        backup.save(tmp_path / "saved")
    assert len(list((tmp_path / "saved" / "objects" / "klear").iterdir())) == 1
    with tarfile.open(tmp_path / "saved" / "runs.tar") as saved:
        kept = set(saved.getnames())
    assert (
        {"runs/history", "runs/artifacts"}
        < kept
        < {"runs/history", "runs/artifacts", "runs/history/one", "runs/history/two"}
    )


def test_the_image_copies_what_exists_installs_extras_of_ours_and_does_not_run_as_root():
    text = (ROOT / "infra" / "images" / "Dockerfile").read_text()
    copied = [path for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for path in line.split()]
    locks = re.findall(r"LOCK=(\w+)", text)
    assert {"cpu", "gpu"} == set(locks)
    for path in copied:
        for lock in locks:
            assert (ROOT / path.replace("${LOCK}", lock)).exists(), path
    extras = {extra for found in re.findall(r"EXTRAS=([\w,]+)", text) for extra in found.split(",")}
    assert extras <= set(PYPROJECT["project"]["optional-dependencies"])
    assert all("cluster" in found.split(",") for found in re.findall(r"EXTRAS=([\w,]+)", text)), (
        "KubeRay needs ray[default]"
    )
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["1000"]
    top_level = {path for path in copied if (ROOT / path).is_dir()}
    assert {"flows", "tasks", "klear_core", "configs"} <= top_level


def test_the_image_takes_no_folder_in_which_somebody_keeps_secrets():
    """`infra/compose/.env` holds the passwords of all servers, and only what git knows is the same for everybody."""
    text = (ROOT / "infra" / "images" / "Dockerfile").read_text()
    folders = {path.split("/")[0] for path in re.findall(r"^COPY (\S+) \S+$", text, re.MULTILINE) if "." not in path}
    assert folders == {"klear_core", "tasks", "configs", "flows"}
    assert re.findall(r"^(?:ARG|ENV) \S*(?:PASSWORD|TOKEN|SECRET|KEY)", text, re.MULTILINE) == []
    assert ".env" in (ROOT / ".gitignore").read_text().splitlines()


def test_the_chart_names_each_chart_that_it_sets_values_of_and_the_versions_of_the_locks():
    chart = yaml.safe_load((HELM / "Chart.yaml").read_text())
    values = yaml.safe_load((HELM / "values.yaml").read_text())
    charts = {each["name"]: each for each in chart["dependencies"]}
    assert set(values) == {*charts, "image", "pool", "with", "runs"}
    assert {each["condition"] for each in charts.values() if "condition" in each} == {
        f"with.{key}" for key in values["with"]
    }
    lock = (ROOT / "infra" / "locks" / "cpu.txt").read_text()
    [prefect] = re.findall(r"^prefect==(.*)$", lock, re.MULTILINE)
    assert values["prefect-server"]["global"]["prefect"]["image"]["prefectTag"].startswith(f"{prefect}-")
    assert values["prefect-worker"]["worker"]["image"]["prefectTag"].startswith(f"{prefect}-")
    assert values["prefect-worker"]["worker"]["config"]["workPool"] == values["pool"]
    mlflow = values["mlflow"]["image"]
    assert f"{mlflow['repository']}:{mlflow['tag']}" == values["image"]
    schema = next((ROOT / "tests" / "files").glob("kuberay_*.json")).stem.removeprefix("kuberay_")
    assert values["kuberay-operator"]["image"]["tag"] == schema == f"v{charts['kuberay-operator']['version']}"


def test_objects_of_the_chart_use_values_and_secrets_that_there_are():
    template = (HELM / "templates" / "klear.yaml").read_text()
    values = yaml.safe_load((HELM / "values.yaml").read_text())
    for path in re.findall(r"\.Values\.([\w.]+)", template):
        value = values
        for key in path.split("."):
            value = value[key]
    page = (HELM / "README.md").read_text()
    named = re.findall(
        r"(?:existing\w*Secret: (?:\{name: )?|secretKeyRef: \{name: )([\w-]+)",
        f"{template}{(HELM / 'values.yaml').read_text()}",
    )
    assert set(named) == set(re.findall(r"secret generic ([\w-]+)", page))
    [command] = re.findall(r"command: \[klear, (\w+), (--\w+)", template)
    assert command[1] in {option for each in get_command(app).commands[command[0]].params for option in each.opts}


def test_locks_pin_all_that_their_image_installs():
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    project = PYPROJECT["project"]
    for lock, extras in {"cpu": ("cluster", "s3", "servers"), "gpu": ("gpu", "s3")}.items():
        lines = (ROOT / "infra" / "locks" / f"{lock}.txt").read_text().splitlines()
        pinned = {canonicalize_name(Requirement(line).name) for line in lines if line and not line.startswith("#")}
        wanted = [*project["dependencies"], *(each for e in extras for each in project["optional-dependencies"][e])]
        assert {canonicalize_name(Requirement(each).name) for each in wanted} <= pinned, lock


def test_systemd_accepts_the_units(tmp_path: Path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    for unit in UNITS:
        text = unit.read_text().replace("/opt/klear/.venv/bin", str(PROGRAMS))
        (tmp_path / unit.name).write_text(text)
    command = ["systemd-analyze", "verify", *map(str, tmp_path.iterdir())]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_units_find_one_another_and_their_names_in_the_page_that_installs_them():
    page = (ROOT / "infra" / "systemd" / "README.md").read_text()
    names = {unit.name for unit in UNITS}
    for unit in UNITS:
        parser = configparser.ConfigParser(strict=False, interpolation=None)
        parser.optionxform = str
        parser.read(unit)
        assert set(parser["Unit"].get("After", "").split()) <= names | {"network-online.target"}
        assert unit.stem in page
