"""The systemd unit and the Kubernetes manifests, by the judges of their own kind; and that they fit the program."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from torch_mooncake.cli import _parser

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = DEPLOY / "systemd" / "torch-mooncake-node.service"
MANIFESTS = [
    (path.name, doc)
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    for doc in yaml.safe_load_all(path.read_text())
]


def verify(unit: Path) -> str:
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    return "\n".join(line for line in done.stderr.splitlines() if unit.name in line)  # not this machine's other units


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = UNIT.read_text()
    installed = tmp_path / "bin" / "torch-mooncake"
    installed.parent.mkdir()
    installed.write_text(f"#!{sys.executable}\n")
    installed.chmod(0o755)
    unit = tmp_path / UNIT.name
    unit.write_text(text.replace("/usr/local/bin/torch-mooncake", str(installed)))
    assert verify(unit) == ""
    unit.write_text(unit.read_text().replace("KillMode=mixed", "KillMode=sometimes"))
    assert "sometimes" in verify(unit)  # the check can fail


def test_the_units_command_is_one_of_ours() -> None:
    lines = UNIT.read_text().splitlines()
    command = next(line for line in lines if line.startswith("ExecStart=")).partition("=")[2]
    example = next(line for line in lines if line.startswith("#   TM_NODE_OPTIONS=")).partition("=")[2]
    args = _parser().parse_args(shlex.split(command.replace("$TM_NODE_OPTIONS", example))[1:])
    assert args.http == "127.0.0.1:9400"
    assert args.memory == 64 << 30
    stop = next(line for line in lines if line.startswith("TimeoutStopSec="))
    assert int(stop.partition("=")[2]) >= args.drain + 5


def test_the_unit_may_write_wherever_its_node_does() -> None:
    """ProtectSystem=strict leaves nothing but what the unit names (and /dev, /proc, /sys and a /tmp of its own)."""
    lines = UNIT.read_text().splitlines()
    settings = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    assert settings["ProtectSystem"] == "strict"
    writable = [Path("/run") / settings["RuntimeDirectory"], Path("/var/lib") / settings["StateDirectory"]]
    writable += [Path(path) for path in settings.get("ReadWritePaths", "").split()]
    example = next(line for line in lines if line.startswith("#   TM_NODE_OPTIONS=")).partition("=")[2]
    args = _parser().parse_args(["node", *shlex.split(example)])
    written = [Path(entry.rpartition(":")[0]) for entry in args.ssd]
    written += [Path(line.partition("TM_RUNTIME_DIR=")[2]) for line in lines if "TM_RUNTIME_DIR=" in line]
    assert len(written) == 2
    for path in written:
        assert any(path.is_relative_to(folder) for folder in writable), path
    assert any("ReadWritePaths=" in line for line in lines if line.startswith("#"))  # said: for a folder elsewhere


@pytest.mark.parametrize(("name", "document"), MANIFESTS, ids=[f"{n}-{d['kind']}" for n, d in MANIFESTS])
def test_manifests_follow_kubernetes_schemas(name: str, document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, "1.31", strict=True)
    if "spec" in document:
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate({**document, "spec": {**document["spec"], "selektor": 1}}, "1.31", strict=True)


def test_the_manifests_pieces_fit_together() -> None:
    documents = {(name, doc["kind"]): doc for name, doc in MANIFESTS}
    service, pool = documents["pool.yaml", "Service"], documents["pool.yaml", "StatefulSet"]
    pod = pool["spec"]["template"]
    container = pod["spec"]["containers"][0]
    args = _parser().parse_args([*container["command"][1:], *container["args"]])
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert pool["spec"]["serviceName"] == service["metadata"]["name"]
    assert args.cluster == f"tcp://{pool['metadata']['name']}-0.{service['metadata']['name']}:7400"
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert args.listen == [f"tcp://0.0.0.0:{ports['pool']}"]
    assert args.http == f"0.0.0.0:{ports['http']}"
    assert {port["name"]: port["port"] for port in service["spec"]["ports"]} == ports
    for probe in ("livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["port"] in ports
        assert container[probe]["timeoutSeconds"] > 2  # our own answer takes two seconds when a worker hangs
    assert pod["spec"]["terminationGracePeriodSeconds"] >= args.drain + 5
    memory = container["resources"]["limits"]["memory"]
    assert int(memory.removesuffix("Gi")) << 30 >= args.memory + (1 << 30)
    etcd = documents["etcd.yaml", "StatefulSet"]
    assert etcd["spec"]["serviceName"] == documents["etcd.yaml", "Service"]["metadata"]["name"]
