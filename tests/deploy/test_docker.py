"""What the image is built from, and the folder for docker compose: linted, consistent, and closed to the outside."""

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.core.version import VERSION
from shoal.deploy.docker import files, is_ours
from shoal.deploy.files import shipped
from shoal.observe.prometheus.scrape import scrape_config

ROOT = Path(__file__).parents[2]
DOCKER = shipped("docker")
DOCKERFILE = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
COMPOSE_TEXT = files()["compose.yaml"]
OF_SHOAL = ("head", "worker", "mlflow")


def interpolated(text: str) -> str:
    """With the value that each variable has unless set."""
    return re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", text)


COMPOSE: dict[str, Any] = yaml.safe_load(interpolated(COMPOSE_TEXT))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
each_service = pytest.mark.parametrize("name", SERVICES)


def tool(name: str) -> str:
    """A checker's path: beside this Python, or of the system."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def passes(*command: str | Path, cwd: Path = ROOT) -> None:
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def bytes_of(size: str) -> int:
    """1gb, 512m."""
    number, unit = re.fullmatch(r"(\d+)([mg])b?", size).groups()  # type: ignore[union-attr]
    return int(number) << {"m": 20, "g": 30}[unit]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What `shoal deploy docker` writes."""
    for name, text in files().items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


# The image


def test_hadolint_finds_nothing() -> None:
    passes(tool("hadolint"), DOCKER / "Dockerfile")


def test_shellcheck_finds_nothing() -> None:
    passes(tool("shellcheck"), DOCKER / "healthcheck.sh")


def test_the_image_has_pinned_bases_and_versions() -> None:
    assert re.search(r"^ARG BASE=python:3\.\d+\.\d+-slim-[a-z]+$", DOCKERFILE, re.MULTILINE)
    pinned = re.search(r"^torch==\S+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned and f"ARG TORCH={pinned[0]}\n" in DOCKERFILE
    assert f"ARG VERSION={VERSION}\n" in DOCKERFILE
    installs = re.findall(r"pip install [^&]*", DOCKERFILE)
    assert len(installs) == 4 and all("--constraint" in line or "--no-deps --no-index" in line for line in installs)


def test_the_image_is_not_run_as_root() -> None:
    final = DOCKERFILE[DOCKERFILE.rindex("\nFROM ") :]
    assert re.findall(r"^USER (.*)$", final, re.MULTILINE) == ["1000:1000"]
    assert "\nSTOPSIGNAL SIGTERM\n" in final and '\nENTRYPOINT ["tini", "--"]\n' in final and "\nHEALTHCHECK " in final
    assert "RAY_AUTH_MODE=token" in final


def test_an_extra_that_is_installed_exists() -> None:
    extras = re.search(r'^ARG EXTRAS="(.*)"$', DOCKERFILE, re.MULTILINE)[1].split(",")  # type: ignore[index]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = runpy.run_path(str(DOCKER / "requirements.py"))["requirements"]
    told = requirements(project, extras)
    assert told[: len(project["dependencies"])] == project["dependencies"]
    assert "images" in extras and {"mlflow", "optuna", "s3fs", "pillow"} <= {
        re.split(r"[<>=\[]", line)[0] for line in told
    }
    with pytest.raises(SystemExit, match=r"EXTRAS: there is no s4; there are azure, deepspeed, .*, s3,"):
        requirements(project, ["s3", "s4"])


def test_the_default_extras_are_documented() -> None:
    extras = re.search(r'^ARG EXTRAS="(.*)"$', DOCKERFILE, re.MULTILINE)[1]  # type: ignore[index]
    assert f"| `EXTRAS` | `{extras}` |" in (ROOT / "docs" / "docker.md").read_text()


def test_only_what_is_copied_reaches_the_build() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in lines if line.startswith("!")}
    copied = {
        word.split("/")[0]
        for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE)
        for word in line.split()[:-1]
        if not word.startswith("--")
    }
    assert "*" in lines and copied == allowed
    assert {"**/secrets", "**/.env"} <= set(lines)


def test_no_registry_of_packages_is_named() -> None:
    for path in [*DOCKER.rglob("*"), ROOT / ".dockerignore"]:
        if path.is_file():
            hosts = re.findall(r"https?://([^/\s\"':]+)", path.read_text())
            assert set(hosts) <= {"127.0.0.1", "mlflow", "prometheus"}, path


@contextmanager
def agent(status: int) -> Iterator[int]:
    """What answers for a node of Ray, always with this status; its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/api/healthz" else 404)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def first_process() -> Iterator[None]:
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("wget") is None:
        pytest.skip("needs root, unshare and wget: the health check looks at the container's first process")
    yield


def health(words: str, port: int) -> int:
    """The status of the health check in a container whose first process has these words."""
    command = f"{shlex.quote(str(DOCKER / 'healthcheck.sh'))}; exit $?"
    namespace = ["unshare", "--pid", "--fork", "--mount-proc", "sh", "-c", command, *shlex.split(words)]
    environment = os.environ | {"SHOAL_AGENT_PORT": str(port), "no_proxy": "127.0.0.1"}
    return subprocess.run(namespace, env=environment, capture_output=True, check=False).returncode


@pytest.mark.usefixtures("first_process")
def test_a_node_is_as_healthy_as_its_agent_says_and_a_training_while_it_runs() -> None:
    with agent(200) as port, agent(503) as failing:
        assert health("ray start --head --block", port) == 0
        assert health("ray start --block", failing) != 0
        assert health("shoal train digits", failing) == 0
    assert health("ray start --block", port) != 0
    assert health("ray status", port) == 0


# The folder for docker compose


def test_yamllint_finds_nothing() -> None:
    passes(tool("yamllint"), "--strict", "--config-file", ROOT / ".yamllint", DOCKER)


def test_prometheus_takes_its_configuration_and_alerts(folder: Path) -> None:
    passes(tool("promtool"), "check", "config", folder / "prometheus.yml")


def test_a_folder_is_known_by_the_first_line(folder: Path) -> None:
    compose = folder / "compose.yaml"
    assert is_ours(compose)
    compose.write_text(COMPOSE_TEXT.replace("localhost/shoal:0.1.0", "localhost/shoal:0.0.9"))
    assert is_ours(compose)
    for other in ("mine", "", "\n" + COMPOSE_TEXT):
        compose.write_text(other)
        assert not is_ours(compose)


def test_the_top_builds_the_image_that_is_started() -> None:
    top = COMPOSE_TEXT.partition("\n\n")[0]
    build = f"docker build -f deploy/docker/Dockerfile -t {SERVICES['head']['image']} ."
    assert build in top and build in DOCKERFILE
    assert top.index(build) < top.index("secrets/$name") < top.index("docker compose up")
    assert "cd " not in top and "deploy docker -o" not in top, "it is read inside of the folder"


def test_docker_compose_takes_the_file(folder: Path) -> None:
    (folder / "secrets").mkdir()
    passes(tool("docker-compose"), "config", "--quiet", cwd=folder)


def test_prometheus_names_metrics_as_elsewhere() -> None:
    config = yaml.safe_load(files()["prometheus.yml"])
    shipped_jobs = {job["job_name"]: job for job in scrape_config()["scrape_configs"]}
    (job,) = config["scrape_configs"]
    assert job["metric_relabel_configs"] == shipped_jobs["ray"]["metric_relabel_configs"]
    assert set(config["rule_files"]) <= set(files())


@each_service
def test_every_container_is_confined(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True and service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service and "cap_add" not in service and service.get("network_mode") is None
    assert re.match(r"[1-9]\d*:", service["user"])
    assert service["pids_limit"] > 0 and set(service["deploy"]["resources"]["limits"]) == {"cpus", "memory"}
    assert service["logging"]["driver"] == "local" and service["restart"] == "unless-stopped"


@each_service
def test_every_container_has_a_pinned_image_and_a_health_check(name: str) -> None:
    service = SERVICES[name]
    assert re.search(r":v?\d+\.\d+\.\d+$", service["image"])
    assert service["image"] == f"localhost/shoal:{VERSION}" or name not in OF_SHOAL
    assert service["healthcheck"]["test"][0] == "CMD"
    for other, how in service.get("depends_on", {}).items():
        assert other in SERVICES and how == {"condition": "service_healthy"}


@each_service
def test_nothing_is_open_beyond_this_machine(name: str) -> None:
    for port in SERVICES[name].get("ports", []):
        host, outside, inside = port.split(":")
        assert host == "127.0.0.1" and outside == inside


@each_service
def test_secrets_are_files_and_nothing_else(name: str) -> None:
    service = SERVICES[name]
    assert set(service.get("secrets", [])) <= set(COMPOSE["secrets"])
    for variable, value in service.get("environment", {}).items():
        if re.search("TOKEN|PASSWORD|SECRET", variable):
            assert value.startswith("/run/secrets/") and Path(value).name in service["secrets"]
    assert not re.search(r"token|password|secret", str(service.get("command")), re.IGNORECASE)


def test_secrets_lie_where_git_does_not_look() -> None:
    assert all(where["file"].startswith("./secrets/") for where in COMPOSE["secrets"].values())
    assert "secrets/" in files()[".gitignore"].splitlines()


@each_service
def test_every_volume_is_declared_or_written(name: str) -> None:
    for volume in SERVICES[name].get("volumes", []):
        source, _, mode = volume.split(":", 1)[0], *volume.partition(":ro")[1:]
        if source.startswith("./"):
            assert source[2:] in files() and volume.endswith(":ro")
        else:
            assert source in COMPOSE["volumes"] and not mode


def start_options(name: str) -> dict[str, Any]:
    """Of a service's `ray start`, as Ray itself reads them."""
    from ray.scripts.scripts import start

    words = shlex.split(SERVICES[name]["command"])
    assert words[:2] == ["ray", "start"]
    return dict(start.make_context("start", words[2:]).params)


def test_ray_takes_the_options_and_they_fit_together() -> None:
    head, worker = start_options("head"), start_options("worker")
    assert head["head"] and head["num_cpus"] == 0 and head["block"] and worker["block"]
    assert worker["address"] == f"head:{head['port']}"
    assert SERVICES["head"]["ports"] == [f"127.0.0.1:{head['dashboard_port']}:{head['dashboard_port']}"]
    (job,) = yaml.safe_load(files()["prometheus.yml"])["scrape_configs"]
    (discovery,) = job["dns_sd_configs"]
    assert discovery["names"] == ["head", "worker"]
    assert {head["metrics_export_port"], worker["metrics_export_port"]} == {discovery["port"]}
    for name, options in {"head": head, "worker": worker}.items():
        service = SERVICES[name]
        limit = bytes_of(service["deploy"]["resources"]["limits"]["memory"])
        assert options["object_store_memory"] < bytes_of(service["shm_size"]) < limit
        assert service["environment"]["RAY_AUTH_MODE"] == "token"
    assert int(SERVICES["worker"]["deploy"]["replicas"]) == 2


def test_the_services_reach_each_other() -> None:
    for one, other in (("head", "mlflow"), ("worker", "mlflow"), ("prometheus", "worker"), ("grafana", "prometheus")):
        assert set(SERVICES[one]["networks"]) & set(SERVICES[other]["networks"])
    assert not set(SERVICES["grafana"]["networks"]) & set(SERVICES["head"]["networks"])
    uri = SERVICES["worker"]["environment"]["MLFLOW_TRACKING_URI"]
    allowed = re.search(r"--allowed-hosts (\S+)", SERVICES["mlflow"]["command"])
    assert allowed and uri.removeprefix("http://") in allowed[1].split(",")


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    (source,) = yaml.safe_load(files()["grafana/datasource.yml"])["datasources"]
    assert source["url"] == "http://prometheus:9090" and source["type"] == "prometheus" and source["isDefault"]
    (provider,) = yaml.safe_load(files()["grafana/dashboards.yml"])["providers"]
    (mounted,) = [volume for volume in SERVICES["grafana"]["volumes"] if "dashboard.json" in volume]
    assert str(Path(mounted.split(":")[1]).parent) == provider["options"]["path"]
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == mounted.split(":")[1]


@pytest.mark.parametrize("variable", sorted(set(re.findall(r"\$\{([A-Z_]+)", COMPOSE_TEXT))))
def test_every_setting_is_documented(variable: str) -> None:
    assert f"`{variable}`" in (ROOT / "docs" / "docker.md").read_text()
