"""examples/cluster and docs/clusters.md: the node check finds planted faults, and what is written there can be read."""

from __future__ import annotations

import importlib.util
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hybridflow.config import check_config, load_config
from hybridflow.flow.rl_job import RLConfig
from hybridflow.runtime.api import RuntimeSettings
from hybridflow.runtime.placement import NodeInventory, plan_placement

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "cluster"
DOCS = (ROOT / "docs" / "clusters.md").read_text()
GB = 2**30


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("check_node", EXAMPLES / "check_node.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_node"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


check_node = load_script()
VERSIONS = dict.fromkeys(check_node.COMPARED, "1.0")
GPUS = tuple(check_node.Gpu("H200", memory_gb=140.0, free_gb=139.0) for _ in range(8))
LINK = check_node.Link(skew_s=0.3, uncertain_s=0.01, versions=VERSIONS)
GOOD = check_node.Node("node1", 900.0, 400.0, 500.0, GPUS, VERSIONS, LINK)
NEEDS = check_node.Needs(gpus=8, gpu_memory_gb=130.0, memory_gb=800.0, shm_gb=300.0, disk_gb=400.0)


def with_gpu(index: int, **changes: Any) -> Any:
    return replace(GOOD, gpus=(*GPUS[:index], replace(GPUS[index], **changes), *GPUS[index + 1 :]))


def with_link(**changes: Any) -> Any:
    return replace(GOOD, link=replace(LINK, **changes))


# What is wrong with a node


def test_a_good_node_has_no_faults() -> None:
    assert check_node.find_faults(GOOD, NEEDS) == []


@pytest.mark.parametrize(
    ("node", "fault"),
    [
        (replace(GOOD, gpus=GPUS[:7]), "GPUs: 7, 8 asked for"),
        (with_gpu(3, trouble="computes 2 of 4 products wrong"), "GPU 3: computes 2 of 4 products wrong"),
        (with_gpu(5, free_gb=20.0), "GPU 5: 20.0 GB of its 140.0 free, 130 GB asked for"),
        (replace(GOOD, memory_gb=700.0), "free memory: 700.0 GB, 800 GB asked for"),
        (replace(GOOD, shm_gb=0.1), "/dev/shm: 0.1 GB, 300 GB asked for"),
        (replace(GOOD, disk_gb=399.0), "temporary disk: 399.0 GB, 400 GB asked for"),
        (replace(GOOD, versions=VERSIONS | {"torch": "2.0"}), "torch 2.0, the head has 1.0"),
        (replace(GOOD, versions=VERSIONS | {"ray": check_node.MISSING}), "ray is not installed"),
        (with_link(skew_s=-4.2), "clock: -4.200 s from the head's, 1 s allowed"),
        (with_link(closed_ports=(6380,)), "port 6380: the head cannot reach it"),
        (with_link(shared="'/runs' cannot be written here"), "shared directory: '/runs' cannot be written here"),
        (replace(GOOD, trouble=("head 10.0.0.1:6379: refused",)), "head 10.0.0.1:6379: refused"),
    ],
)
def test_each_fault_is_named_alone(node: Any, fault: str) -> None:
    assert check_node.find_faults(node, NEEDS) == [fault]


def test_a_clock_is_wrong_only_beyond_what_the_network_leaves_open() -> None:
    assert check_node.find_faults(with_link(skew_s=1.4, uncertain_s=0.5), NEEDS) == []
    assert len(check_node.find_faults(with_link(skew_s=1.6, uncertain_s=0.5), NEEDS)) == 1


# What is found out


def test_the_product_is_right_here() -> None:
    assert check_node.try_product("cpu", size=64) == ""


def test_a_device_that_computes_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.Tensor.__matmul__

    def with_one_wrong(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = right(a, b)
        product[5, 7] += 1
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", with_one_wrong)
    assert check_node.try_product("cpu", size=64) == "computes 1 of 4096 products wrong"


def test_another_source_is_another_version(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    before = check_node._hash_source(str(tmp_path))
    (tmp_path / "a.py").write_text("x = 2\n")
    assert check_node._hash_source(str(tmp_path)) != before


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    (tmp_path / "shared").mkdir()
    return tmp_path / "shared"


@pytest.fixture
def head(shared: Path) -> Iterator[tuple[str, int]]:
    with check_node.Head(free_port(), str(shared)) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield "127.0.0.1", server.server_address[1]
        server.shutdown()


def test_the_head_tells_which_ports_it_reaches(head: tuple[str, int], shared: Path) -> None:
    trouble: list[str] = []
    with check_node.listening([free_port()], trouble) as ports:
        closed = free_port()
        link = check_node.measure_link(head, [*ports, closed], str(shared), timeout_s=5)
    assert trouble == []
    assert link.closed_ports == (closed,)
    assert link.shared == ""
    assert link.versions == check_node.measure_versions()
    assert list(shared.iterdir()) == []


def test_a_directory_that_is_not_shared_is_found(head: tuple[str, int], tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    assert "the head does not see" in check_node.try_shared(head, str(tmp_path / "own"), timeout_s=0.1)
    assert "cannot be written here (No such file" in check_node.try_shared(head, str(tmp_path / "no"), timeout_s=0.1)


def test_the_head_looks_for_no_other_files(head: tuple[str, int], shared: Path) -> None:
    (shared / "secret").touch()
    assert check_node._ask(head, 5, "file", name="secret") is False
    assert check_node._ask(head, 5, "file", name=".check_node-/../../secret") is False


def test_a_clock_that_is_ahead_is_measured(head: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time
    in_head = threading.main_thread()
    monkeypatch.setattr(check_node.time, "time", lambda: now() + 7 * (threading.current_thread() is in_head))
    skew_s, uncertain_s = check_node.measure_skew(head, timeout_s=5)
    assert abs(skew_s - 7) <= uncertain_s + 0.01


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("", 0)) as taken:
        trouble: list[str] = []
        port = taken.getsockname()[1]
        with check_node.listening([port], trouble) as ports:
            assert ports == []
    assert trouble == [f"port {port}: cannot be listened on (Address already in use)"]


# The command


def run_check(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "check_node.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_this_machine_passes() -> None:
    done = run_check("--disk", "0.001", "--memory", "0.001")
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 1), done.stdout + done.stderr
    assert re.match(rf"{re.escape(socket.gethostname())} ok .*torch {re.escape(torch.__version__)}", done.stdout)


def test_planted_faults_end_the_command_with_one() -> None:
    nobody = free_port()
    done = run_check(
        "--disk", "1e9", "--gpus", "1000", "--expect", "torch=0.1", "--head", f"127.0.0.1:{nobody}", "--timeout", "0.1"
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"{socket.gethostname()} BAD head 127.0.0.1:{nobody}: [Errno 111] Connection refused; ")
    for fault in (
        r"temporary disk: [\d.]+ GB, 1e\+09 GB asked for",
        r"GPUs: \d+, 1000 asked for",
        "torch .*, 0.1 asked",
    ):
        assert re.search(fault, line), (fault, line)


def test_an_unknown_version_is_refused() -> None:
    done = run_check("--expect", "numpy=2")
    assert done.returncode == 2
    assert "'numpy=2' is not NAME=VERSION with NAME one of python, torch" in done.stderr


# Scripts


@pytest.mark.parametrize("script", sorted(path.name for path in EXAMPLES.glob("*.sh")))
def test_scripts_parse(script: str) -> None:
    done = subprocess.run(["bash", "-n", str(EXAMPLES / script)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def start_node(tmp_path: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs start_node.sh with a `ray` that prints what it was given."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ray").write_text('#!/bin/bash\necho "$RAY_AUTH_MODE $RAY_AUTH_TOKEN $*"\n')
    (tmp_path / "bin" / "ray").chmod(0o755)
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin"
    return subprocess.run(
        [shutil.which("bash") or "bash", str(EXAMPLES / "start_node.sh"), *words],
        env={"PATH": path, "HOME": str(tmp_path), **environment}, capture_output=True, text=True, timeout=30,
    )  # fmt: skip


def test_no_node_starts_without_a_token(tmp_path: Path) -> None:
    done = start_node(tmp_path, "head", "127.0.0.1")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no Ray token" in done.stderr and "ray get-auth-token --generate" in done.stderr


@pytest.mark.parametrize(
    ("role", "where"),
    [("head", "--head --port 7000 --include-dashboard false"), ("worker", "--address 127.0.0.1:7000")],
)
def test_a_node_starts_with_the_token_and_its_ports(role: str, where: str, tmp_path: Path) -> None:
    done = start_node(tmp_path, role, "127.0.0.1", "--num-gpus", "4", RAY_AUTH_TOKEN="abc", PORT="7000")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == (
        f"token abc start {where} --node-ip-address 127.0.0.1 --node-manager-port 7001 --object-manager-port 7002 "
        "--disable-usage-stats --block --num-gpus 4"
    )


# YAML


def read_kuberay() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / "kuberay.yaml").read_text()))


def test_every_pod_has_the_shared_volume_memory_and_the_token() -> None:
    job, claim = read_kuberay()
    assert (job["apiVersion"], job["kind"], claim["kind"]) == ("ray.io/v1", "RayJob", "PersistentVolumeClaim")
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    pods = [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    assert len(pods) == 2
    for pod in pods:
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        (container,) = pod["containers"]
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        assert mounts["/shared"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        assert container["image"] == pods[0]["containers"][0]["image"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert "runtime.kind=ray runtime.address=auto" in job["spec"]["entrypoint"]


def test_workers_of_the_rayjob_offer_the_gpus_that_the_pod_has() -> None:
    (group,) = read_kuberay()[0]["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    assert group["rayStartParams"]["num-gpus"] == container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == 2


def test_the_image_has_what_the_project_asks_for() -> None:
    text = (EXAMPLES / "Containerfile").read_text()
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^ARG TORCH=(.*)$", text, re.M)[1] == re.search(r"^TORCH  \?= (.*)$", makefile, re.M)[1]  # type: ignore[index]
    assert re.search(r"^ARG BASE=\S+:13\.0\.2-base-ubuntu24\.04@sha256:[0-9a-f]{64}$", text, re.M)
    for source in re.findall(r"^COPY (.*) \S+$", text, re.M):
        assert all((ROOT / name).exists() for name in source.split()), source


# The documentation


def test_the_placement_of_the_docs_fits_two_nodes_of_eight(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", DOCS, re.S)
    (tmp_path / "my_rl.yaml").write_text(text)
    config = load_config(RLConfig, config_path=tmp_path, config_name="my_rl")
    assert (config.runtime.kind, config.runtime.address) == ("ray", "auto")
    nodes = (NodeInventory("a", "10.0.0.1", 8, 64), NodeInventory("b", "10.0.0.2", 8, 64))
    placement = plan_placement(config.runtime.placement, nodes, ("actor", "rollout", "reward"))
    found = {placed.role: Counter(slot.node_id for slot in placed.slots) for placed in placement.roles}
    assert found == {
        "actor": {"a": 4, "b": 4}, "rollout": {"a": 4, "b": 4}, "reward": {"a": 1},
    }  # fmt: skip


def test_the_device_map_of_the_docs_is_the_same_but_for_the_strategy() -> None:
    (text,) = re.findall(r"runtime\.placement\.device_map=(\{.*?\})'", DOCS)
    settings = check_config(RuntimeSettings, {"placement": {"device_map": yaml.safe_load(text)}})
    nodes = (NodeInventory("a", "10.0.0.1", 8, 64), NodeInventory("b", "10.0.0.2", 8, 64))
    placement = plan_placement(settings.placement, nodes, ("actor", "rollout", "reward"))
    assert {placed.role: len(placed.slots) for placed in placement.roles} == {"actor": 8, "rollout": 8, "reward": 8}


def test_the_defaults_of_the_docs_are_the_defaults() -> None:
    defaults = RuntimeSettings()
    rows = re.findall(r"^\| `runtime\.(recovery\.)?(\w+)` \| (\d+)", DOCS, re.M)
    assert len(rows) == 6
    for section, name, value in rows:
        found = vars(defaults.recovery if section else defaults)[name]
        assert found == float(value), name


def test_the_docs_name_files_that_are_there() -> None:
    for path in re.findall(r"\]\(([^)#]+)\)", DOCS):
        assert (ROOT / "docs" / path).exists(), path
    for path in re.findall(r"examples/cluster/[\w.]+", DOCS):
        assert (ROOT / path).exists(), path


def test_start_node_has_the_health_checks_that_the_docs_tell() -> None:
    text = (EXAMPLES / "start_node.sh").read_text()
    ours = [
        re.search(rf"RAY_health_check_{name}:-(\d+)", text)[1]
        for name in ("period_ms", "timeout_ms", "failure_threshold")
    ]  # type: ignore[index]
    assert f"`start_node.sh` has {', '.join(ours)}." in DOCS
