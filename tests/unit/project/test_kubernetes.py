"""configs/kubernetes and docs/clusters.md agree with Kubernetes' schemas and with the library."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml

import weightsync
from tests.pages import ROOT, blocks
from weightsync.config import SyncConfig, parse_ports, parse_size
from weightsync.recipes.cli import app
from weightsync.recipes.config.recipe import load_recipe
from weightsync.recipes.doctor import probes
from weightsync.recipes.inputs import recipe_file

FOLDER, PAGE = ROOT / "configs/kubernetes", "docs/clusters.md"
DOCKERFILES = sorted(FOLDER.glob("*.Dockerfile"))
MANIFESTS: list[dict[str, Any]] = [
    manifest for path in sorted(FOLDER.glob("*.yaml")) for manifest in yaml.safe_load_all(path.read_text())
]
COMMANDS = [
    shlex.split(line, comments=True)
    for block in blocks(PAGE, "sh")
    for line in block.replace("\\\n", " ").splitlines()
    if line
]


def manifests(kind: str) -> list[dict[str, Any]]:
    return [manifest for manifest in MANIFESTS if manifest["kind"] == kind]


def templates(node: Any) -> Iterator[dict[str, Any]]:
    """Yield every pod template below `node`."""
    if isinstance(node, dict):
        if "containers" in node.get("template", {}).get("spec", {}):
            yield node["template"]
        for child in node.values():
            yield from templates(child)
    elif isinstance(node, list):
        for child in node:
            yield from templates(child)


PODS = list(templates(MANIFESTS))


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda manifest: manifest["kind"])
def test_manifests_fit_kubernetes_schemas(manifest: dict[str, Any]) -> None:
    """KubeRay's kinds are in no schema of Kubernetes, so only their pods are checked."""
    checked = [manifest]
    if manifest["apiVersion"] == "ray.io/v1":
        assert manifest["kind"] in ("RayCluster", "RayJob")
        checked = [{"apiVersion": "v1", "kind": "Pod", **template} for template in templates(manifest)]
    for each in checked:
        kubernetes_validate.validate(each, "1.30", strict=True)


def test_a_misspelt_field_of_a_pod_is_found() -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", **PODS[0]}
    pod["spec"] = pod["spec"] | {"hostIpc": True}
    with pytest.raises(kubernetes_validate.ValidationError, match="hostIpc"):
        kubernetes_validate.validate(pod, "1.30", strict=True)


@pytest.mark.parametrize("pod", PODS, ids=lambda pod: pod["spec"]["containers"][0]["name"])
def test_processes_that_share_memory_are_in_one_container(pod: dict[str, Any]) -> None:
    (container,) = pod["spec"]["containers"]
    assert {"hostIPC", "hostPID", "hostNetwork", "initContainers"}.isdisjoint(pod["spec"])
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    shm = volumes[mounts["/dev/shm"]]["emptyDir"]
    assert shm["medium"] == "Memory"
    limits = container["resources"]["limits"]
    assert _nbytes(shm["sizeLimit"]) <= _nbytes(limits["memory"]) // 4
    if "nvidia.com/gpu" in limits:
        assert _nbytes(shm["sizeLimit"]) >= SyncConfig().max_staging_bytes
    claimed = volumes[mounts["/runs"]]["persistentVolumeClaim"]["claimName"]
    assert claimed in [claim["metadata"]["name"] for claim in manifests("PersistentVolumeClaim")]
    (policy,) = manifests("NetworkPolicy")
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()


def _nbytes(quantity: str) -> int:
    return parse_size(f"{quantity}B")


def test_images_are_built_by_the_dockerfiles() -> None:
    images = {f"weightsync-{path.stem}:{weightsync.__version__}": path for path in DOCKERFILES}
    assert {pod["spec"]["containers"][0]["image"] for pod in PODS} == set(images)
    for image, path in images.items():
        command = f"docker build -f {path.relative_to(ROOT)} -t {image} ."
        assert command in path.read_text().splitlines()[0]
        assert command.split() in COMMANDS


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_dockerfiles_copy_and_install_what_the_checkout_has(path: Path) -> None:
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.M).replace("\\\n", " ")
    steps = [line.split(maxsplit=1) for line in text.splitlines() if line]
    assert steps[0][0] == "FROM"
    assert {name for name, _ in steps} <= {"FROM", "RUN", "WORKDIR", "COPY", "ENV"}
    copied = {source for name, rest in steps if name == "COPY" for source in rest.split()[:-1]}
    assert [source for source in copied if not (ROOT / source).exists()] == []
    setup = (ROOT / "setup.py").read_text()
    needed = {
        "pyproject.toml",
        "setup.py",
        *re.findall(r'"(README\.md|weightsync)\b', setup),
        "LICENSE",
        "actors",
        "recipes",
    }
    assert needed <= copied
    (install,) = (rest for name, rest in steps if name == "RUN" and rest.startswith("pip install"))
    match = re.fullmatch(r'pip install --no-cache-dir "\.\[([\w,]+)\]" -c (requirements/\w+\.txt)', install)
    assert match
    assert all(f'"{extra}": [' in setup for extra in match[1].split(","))
    assert (ROOT / match[2]).exists()
    assert (path.stem == "engine") == ("vllm" in match[1].split(","))


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_images_have_the_package_that_doctor_would_ask_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL uses RDMA only if it finds this library."""
    monkeypatch.setattr(probes, "rdma_devices", lambda: ["mlx5_0"])
    monkeypatch.setattr(probes, "VERBS", "libverbs-of-nobody.so")
    wanted = re.match(r"apt-get install ([\w-]+)", probes.rdma().remedy)
    assert wanted
    (install,) = re.findall(r"apt-get install -y --no-install-recommends ([\w +-]+) &&", path.read_text())
    assert {wanted[1], "g++", "wget"} == {*install.split()}


def test_ray_is_the_version_of_the_images() -> None:
    (cluster,) = manifests("RayCluster")
    pins = (ROOT / "requirements/vllm.txt").read_text()
    assert f"\nray=={cluster['spec']['rayVersion']}\n" in pins


def test_gpus_are_those_that_the_recipe_needs() -> None:
    """Each way to run has a worker pod with as many GPUs."""
    needed = load_recipe(recipe_file("disaggregated")).num_devices
    (cluster,) = manifests("RayCluster")
    engines, trainers = cluster["spec"]["workerGroupSpecs"]
    assert trainers["replicas"] == 0  # a recipe would place engines there too, without vLLM
    assert needed == engines["replicas"] * _num_gpus(engines)
    (workers,) = manifests("StatefulSet")
    assert needed == workers["spec"]["replicas"] * _num_gpus(workers["spec"])
    (job,) = manifests("Job")
    assert needed == _num_gpus(job["spec"])
    for group in (engines, trainers):
        resources = yaml.safe_load(yaml.safe_load(group["rayStartParams"]["resources"]))
        assert resources == {group["groupName"].rstrip("s"): _num_gpus(group)}


def _num_gpus(owner: dict[str, Any]) -> int:
    (container,) = owner["template"]["spec"]["containers"]
    return int(container["resources"]["limits"]["nvidia.com/gpu"])


def test_ports_are_open_and_apart() -> None:
    """Those of `sync.ports`, of the kernel's range and of Ray's workers."""
    (policy,) = manifests("NetworkPolicy")
    within, dashboard = policy["spec"]["ingress"]
    open_ports = [(rule["port"], rule.get("endPort", rule["port"])) for rule in within["ports"]]
    assert open_ports == sorted(open_ports)
    assert all(last < first for (_, last), (first, _) in pairwise(open_ports))
    synced = {argument.split("=")[1] for argument in _arguments() if argument.startswith("sync.ports=")}
    synced |= {after for before, after in pairwise(_arguments()) if before == "--ports"}
    assert {parse_ports(each) for each in synced} == {(29600, 29699)} <= set(open_ports)
    joins = {
        int(port) for port in re.findall(r"join_port=(\d+)", "".join(blocks("docs/servers.md", "python")))
    }
    assert {(port, port) for port in joins} <= set(open_ports), "else servers do not reach the driver"
    kernels = {
        tuple(map(int, sysctl["value"].split()))
        for pod in PODS
        for sysctl in pod["spec"].get("securityContext", {}).get("sysctls", ())
    }
    assert kernels == {(40000, 40999)} <= set(open_ports)
    (service,) = manifests("Service")
    exposed = {port["port"] for port in service["spec"]["ports"]}
    assert exposed <= {first for first, _ in open_ports} | {rule["port"] for rule in dashboard["ports"]}


def _entrypoints() -> list[list[str]]:
    """All commands of manifests and of the page."""
    started = [
        container["command"]
        for pod in PODS
        for container in pod["spec"]["containers"]
        if "command" in container
    ]
    return [*started, *(job["spec"]["entrypoint"].split() for job in manifests("RayJob")), *COMMANDS]


def _arguments() -> list[str]:
    return [argument for command in _entrypoints() for argument in command]


def ray_start() -> Any:
    """Return Ray's command. Importing it takes half a second, in each process that collects tests."""
    from ray.scripts import scripts

    return scripts.start


def test_commands_are_known() -> None:
    """Each `weightsync` and each `ray start` parses, and recipes with their overrides load."""
    ours: Any = typer.main.get_command(app)
    found = set()
    for command in _entrypoints():
        if "weightsync" in command:
            name, *args = command[command.index("weightsync") + 1 :]
            found.add(name)
            context = ours.commands[name].make_context(name, args)
            if name == "run":
                assert load_recipe(recipe_file(context.params["recipe"])).name == "disaggregated"
        elif command[:2] == ["ray", "start"]:
            ray_start().make_context("start", command[2:])
    assert found == {"run", "doctor"}


def test_ray_start_knows_the_parameters_of_kuberay() -> None:
    (cluster,) = manifests("RayCluster")
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    known = {option for param in ray_start().params for option in param.opts}
    assert {f"--{name}" for group in groups for name in group["rayStartParams"]} <= known
    (job,) = manifests("RayJob")
    assert job["spec"]["clusterSelector"] == {"ray.io/cluster": cluster["metadata"]["name"]}


def test_the_page_applies_each_manifest() -> None:
    builds = ["docker", "build"], ["kubectl", "apply"]
    applied = {command[command.index("-f") + 1] for command in COMMANDS if command[:2] in builds}
    assert {str(path.relative_to(ROOT)) for path in FOLDER.iterdir()} == applied
