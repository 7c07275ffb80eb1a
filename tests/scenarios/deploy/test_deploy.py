"""Files of `deploy/`: images, compose file, manifests and systemd unit name files, targets and options that exist."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from rootgraft.api.cli.commands import COMMANDS
from rootgraft.api.cli.flag_parser import parse
from rootgraft.api.config import ServerConfig
from rootgraft.api.http.loop_watch import SILENT_SECONDS
from rootgraft.api.http.server import CLOSE_SECONDS
from rootgraft.engine.config import EngineConfig
from rootgraft.fleet.on_ray.ray_cluster import VERSIONS, check_address

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
Stage = list[tuple[str, str]]


def stages() -> dict[str, tuple[str, Stage]]:
    """Stages of the Dockerfile by name: what each is built from, and its instructions."""
    text = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^\s*#.*\n", "", (DEPLOY / "Dockerfile").read_text("utf-8")))
    found: dict[str, tuple[str, Stage]] = {}
    current: Stage = []
    for line in filter(None, text.splitlines()):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, name = re.fullmatch(r"(\S+) AS (\S+)", rest).groups()  # type: ignore[union-attr]
            current = []
            found[name] = base, current
        else:
            current.append((word, rest.strip()))
    return found


def whole(name: str) -> Stage:
    """The instructions of a stage and of those below it."""
    base, own = stages()[name]
    return [*(whole(base) if base in stages() else []), *own]


def last(name: str, word: str) -> str:
    return [rest for instruction, rest in whole(name) if instruction == word][-1]


def options_of(words: list[str]) -> list[Any]:
    """The options that a command line gives; raises for one that does not parse."""
    command = COMMANDS[words[0]]
    return parse("p", "", command.classes, command.positional, words[1:])


def server_of(words: list[str]) -> ServerConfig:
    return next(options for options in options_of(words) if isinstance(options, ServerConfig))


@pytest.mark.parametrize("image", ["cpu", "cuda"])
def test_an_image_runs_without_rights_and_tells_its_health(image: str) -> None:
    assert last(image, "USER") == "10001:10001" and stages()[image][1][-1][0] == "USER"
    assert last(image, "VOLUME") == "/models" and "XDG_CACHE_HOME=/models" in last(image, "ENV") + str(whole(image))
    port = int(last(image, "EXPOSE"))
    words = [*json.loads(last(image, "ENTRYPOINT")), *json.loads(last(image, "CMD"))]
    assert words[0] == "rootgraft"
    server = server_of(words[1:])
    assert (server.host, server.port) == ("0.0.0.0", port)
    check = json.loads(last(image, "HEALTHCHECK").partition("CMD ")[2])
    assert check[:3] == ["python", "-P", "-c"] and f"127.0.0.1:{port}/health" in check[3]
    compile(check[3], "health check", "exec")


def test_the_default_target_is_the_cpu_image_and_has_no_compiler() -> None:
    assert list(stages())[-1] == "cpu"
    assert not [rest for word, rest in whole("cpu") if word == "RUN" and "apt-get" in rest]


def test_the_base_of_each_stage_is_a_digest() -> None:
    base = re.findall(r"(?m)^ARG BASE=(\S+)$", (DEPLOY / "Dockerfile").read_text("utf-8"))
    assert len(base) == 1 and re.fullmatch(r"python:3\.12[.\d]*-slim-bookworm@sha256:[0-9a-f]{64}", base[0])
    assert {source for source, _ in stages().values()} <= {"${BASE}", *stages()}


def test_what_a_build_copies_and_runs_exists() -> None:
    for name, (_, instructions) in stages().items():
        for word, rest in instructions:
            if word == "COPY" and (source := re.match(r"--from=(\S+)", rest)):
                assert source[1] in stages(), name
            for module in re.findall(r"python -P -m (\S+)", rest):
                assert importlib.util.find_spec(module), module
            for extra in re.findall(r"pip install \"\.\[(\w+)\]\"", rest):
                assert extra in PROJECT["optional-dependencies"]
            if word == "ARG" and rest.startswith("EXTRAS="):
                assert rest.removeprefix("EXTRAS=") in PROJECT["optional-dependencies"]
            for requirement in re.findall(r'"(torch[^"]*)"', rest):
                assert requirement in PROJECT["dependencies"]
    allowed = [line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"]
    assert all((ROOT / name).exists() for name in allowed)
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"benchmarks", "tests", "examples"}
    assert packages <= set(allowed) and {"pyproject.toml", "setup.py", "README.md"} <= set(allowed)


def test_the_compose_file() -> None:
    file = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
    assert set(file["services"]) == {"rootgraft", "rootgraft-cuda"}
    for service in file["services"].values():
        build = service["build"]
        assert (DEPLOY / build["context"] / build["dockerfile"]).samefile(DEPLOY / "Dockerfile")
        assert build["target"] in stages() and service["image"] == f"rootgraft:{build['target']}"
        server = server_of(service["command"])
        assert service["ports"] == [f"127.0.0.1:{server.port}:{last(build['target'], 'EXPOSE')}"]
        assert float(service["stop_grace_period"].removesuffix("s")) > server.shutdown_timeout + 10
        (volume,) = service["volumes"]
        assert volume.split(":")[0] in file["volumes"] and volume.split(":")[1] == last(build["target"], "VOLUME")
        assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["tmpfs"] == ["/tmp"]


def manifests() -> dict[str, dict[str, Any]]:
    text = (DEPLOY / "kubernetes" / "rootgraft.yaml").read_text("utf-8")
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def test_the_kubernetes_manifests() -> None:
    found = manifests()
    assert set(found) == {"PersistentVolumeClaim", "Deployment", "Service", "NetworkPolicy"}
    spec = found["Deployment"]["spec"]
    pod, labels = spec["template"]["spec"], spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"] == labels == found["Service"]["spec"]["selector"]
    (container,) = pod["containers"]
    target = container["image"].partition(":")[2]
    server, mounts = (
        server_of(container["args"]),
        {each["mountPath"]: each["name"] for each in container["volumeMounts"]},
    )
    assert container["image"] == f"rootgraft:{target}" and target in stages() and server.host == "0.0.0.0"
    ((port,), (service,)) = container["ports"], found["Service"]["spec"]["ports"]
    assert port["containerPort"] == server.port and service["targetPort"] == port["name"]
    for probe, path in (
        ("startupProbe", "/health/ready"),
        ("readinessProbe", "/health/ready"),
        ("livenessProbe", "/health/live"),
    ):
        assert container[probe]["httpGet"] == {"path": path, "port": port["name"]}
    assert pod["terminationGracePeriodSeconds"] > server.shutdown_timeout + 10
    assert f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}" == last(target, "USER")
    assert mounts[last(target, "VOLUME")] == "models" and mounts["/tmp"] == "tmp"
    assert server.api_key_file is not None and mounts[str(Path(server.api_key_file).parent)] == "keys"
    assert {each["name"] for each in pod["volumes"]} == set(mounts.values())
    check_that_little_is_taken(pod)
    policy = found["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == labels and policy["policyTypes"] == ["Ingress"]
    assert policy["ingress"] == [{"ports": [{"protocol": "TCP", "port": server.port}]}]


def check_that_little_is_taken(pod: dict[str, Any]) -> None:
    """A pod has no token of a service account, and what it writes to the node's disk is bounded."""
    assert pod["automountServiceAccountToken"] is False and pod["securityContext"]["runAsNonRoot"] is True
    assert all(each["emptyDir"]["sizeLimit"] for each in pod["volumes"] if "emptyDir" in each)
    for container in pod["containers"]:
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["resources"]["limits"]["memory"]


def test_kubernetes_takes_the_manifests() -> None:
    """Every field is in the API's schemas, also of the oldest version that is still common."""
    validator = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    for manifest in manifests().values():
        for version in ("1.28", "1.37"):
            validator.validate(manifest, version, strict=True)
    wrong = {**manifests()["Service"], "spec": {"selectors": {}}}
    with pytest.raises(validator.ValidationError):
        validator.validate(wrong, "1.37", strict=True)


def on_ray() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The RayCluster, the service of its server, and who may reach which port."""
    cluster, service, policy = yaml.safe_load_all((DEPLOY / "kubernetes" / "raycluster.yaml").read_text("utf-8"))
    return cluster, service, policy


def test_the_manifest_for_kuberay() -> None:
    cluster, service, policy = on_ray()
    spec = cluster["spec"]
    head, (workers,) = spec["headGroupSpec"], spec["workerGroupSpecs"]
    ray, server = head["template"]["spec"]["containers"]
    (worker,) = workers["template"]["spec"]["containers"]
    assert (cluster["apiVersion"], cluster["kind"], service["kind"]) == ("ray.io/v1", "RayCluster", "Service")
    assert set(spec) == {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
    assert set(head) == {"rayStartParams", "template"}
    assert set(workers) == {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
    assert tuple(map(int, spec["rayVersion"].split(".")[:2])) == VERSIONS
    assert all(isinstance(each, str) for group in (head, workers) for each in group["rayStartParams"].values())
    # A worker pod has room for one replica, and there are as many of them; none is placed beside the server.
    config = next(options for options in options_of(server["args"]) if isinstance(options, EngineConfig))
    options = server_of(server["args"])
    assert options.replicas == workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"]
    assert worker["resources"]["limits"]["cpu"] == str(config.threads) and head["rayStartParams"]["num-cpus"] == "0"
    assert options.ray_address is not None and config.device == "cpu"
    check_address(options.ray_address)
    assert options.ray_address.endswith(f":{ray['readinessProbe']['tcpSocket']['port']}")
    assert worker["readinessProbe"]["tcpSocket"]["port"] == int(workers["rayStartParams"]["node-manager-port"])
    labels = head["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels != workers["template"]["metadata"]["labels"]
    assert server["ports"][0]["name"] == service["spec"]["ports"][0]["targetPort"] and options.host == "0.0.0.0"
    # Ray takes commands from who has the token, from pods of the cluster alone, and no pod has a service account.
    assert {"name": "RAY_AUTH_MODE", "value": "token"} in ray["env"] and ray["env"] == server["env"] == worker["env"]
    pods = [group["template"] for group in (head, workers)]
    for pod in pods:
        check_that_little_is_taken(pod["spec"])
    chosen = policy["spec"]["podSelector"]["matchLabels"]
    assert all(chosen.items() <= pod["metadata"]["labels"].items() for pod in pods)
    among, http = policy["spec"]["ingress"]
    assert among == {"from": [{"podSelector": {"matchLabels": chosen}}]}
    assert [each["port"] for each in http["ports"]] == [service["spec"]["ports"][0]["port"]]
    models = {each["mountPath"] for each in (*server["volumeMounts"], *worker["volumeMounts"])} - {"/tmp/ray"}
    assert models == {"/models", "/etc/rootgraft/keys"} and str(config.model).startswith("/models/")


def test_kubernetes_takes_the_pods_for_kuberay() -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    cluster, service, policy = on_ray()
    pods = (cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"])
    for version in ("1.28", "1.37"):
        validator.validate(service, version, strict=True)
        validator.validate(policy, version, strict=True)
        for pod in pods:
            whole_pod = {"apiVersion": "v1", "kind": "Pod", **pod["template"]}
            validator.validate(whole_pod, version, strict=True)
    with pytest.raises(validator.ValidationError):
        validator.validate({**whole_pod, "spec": {**whole_pod["spec"], "container": []}}, "1.37", strict=True)


def unit() -> dict[str, list[str]]:
    settings: dict[str, list[str]] = {}
    for line in (DEPLOY / "systemd" / "rootgraft.service").read_text("utf-8").splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            settings.setdefault(key, []).append(value)
    return settings


def test_the_systemd_unit() -> None:
    settings = unit()
    program, *words = shlex.split(settings["ExecStart"][0])
    assert program == "/opt/rootgraft/bin/rootgraft" and words[1] == "--config"
    config = DEPLOY / "systemd" / Path(words[2]).name
    server = server_of([words[0], "--config", str(config)])
    assert float(settings["TimeoutStopSec"][0]) > server.shutdown_timeout + 10
    assert float(settings["TimeoutStopSec"][0]) > server.shutdown_timeout + CLOSE_SECONDS
    assert float(settings["WatchdogSec"][0]) > SILENT_SECONDS
    assert settings["Type"] == ["notify"] and settings["RestartPreventExitStatus"] == ["2"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """Every setting is known to it; the program is another, as ours is not installed there."""
    text = (DEPLOY / "systemd" / "rootgraft.service").read_text("utf-8")
    file = tmp_path / "rootgraft.service"
    file.write_text(text.replace("/opt/rootgraft/bin/rootgraft", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(file)], capture_output=True, text=True, check=False)
    assert not [line for line in done.stderr.splitlines() if "rootgraft.service" in line]
