"""The doctor's checks against machines made of files, and against this one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from torch_mooncake.cli import checks
from torch_mooncake.cli.checks import Check


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def named(found: list[Check], name: str) -> Check:
    return next(check for check in found if check.name == name)


def test_cgroup_limits_of_both_versions_and_of_the_parents(tmp_path: Path) -> None:
    v2 = write(
        tmp_path / "v2",
        {
            "proc/self/cgroup": "0::/pod/app\n",
            "sys/fs/cgroup/pod/memory.max": "2147483648\n",
            "sys/fs/cgroup/pod/app/memory.max": "max\n",
        },
    )
    assert checks.cgroup_memory_limit(v2) == 2 << 30
    v1 = write(
        tmp_path / "v1",
        {
            "proc/self/cgroup": "3:cpu:/x\n2:memory,hugetlb:/box\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "536870912\n",
        },
    )
    assert checks.cgroup_memory_limit(v1) == 512 << 20
    (found,) = checks.memory(v1)
    assert not found.ok
    assert "cgroup limit 512.0 MiB" in found.value
    assert checks.cgroup_memory_limit(tmp_path / "nothing") is None


def test_gpudirect_storage_with_and_without_its_library_and_its_kernel_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries = {"libcuda.so.1"}

    class Library:
        def __init__(self, name: str) -> None:
            if name not in libraries:
                raise OSError(f"{name}: cannot open shared object file")

        def cuDriverGetVersion(self, version: object) -> int:
            return 0

    monkeypatch.setattr(checks.ctypes, "CDLL", Library)
    found = named(list(checks.cuda(tmp_path)), "GPUDirect Storage")
    assert found.ok
    assert "pinned memory" in found.value
    libraries.add("libcufile.so.0")
    found = named(list(checks.cuda(tmp_path)), "GPUDirect Storage")
    assert not found.ok
    assert "nvidia_fs" in found.advice
    found = named(list(checks.cuda(write(tmp_path, {"proc/driver/nvidia-fs/version": "2.1\n"}))), "GPUDirect Storage")
    assert found.ok


def test_rdma_ports_that_are_down_and_devices_that_may_not_be_opened(tmp_path: Path) -> None:
    ports = {f"sys/class/infiniband/mlx5_{i}/ports/1/state": s for i, s in enumerate(["4: ACTIVE\n", "1: DOWN\n"])}
    found = list(checks.rdma(write(tmp_path, ports)))
    devices = named(found, "RDMA devices")
    assert devices.ok
    assert devices.value == "mlx5_0, mlx5_1; ports that are down: mlx5_1/1"
    access = named(found, "access to RDMA devices")
    assert not access.ok
    assert "--device=/dev/infiniband" in access.advice
    assert "memlock" in named(found, "locked memory").advice
    write(tmp_path, {"sys/class/infiniband/mlx5_0/ports/1/state": "1: DOWN\n"})
    assert not named(list(checks.rdma(tmp_path)), "RDMA devices").ok


def test_gids_and_packets_of_roce_ports(tmp_path: Path) -> None:
    def port(name: str, gids: list[tuple[str, str]], mtu: int) -> dict[str, str]:
        folder = f"sys/class/infiniband/{name}/ports/1"
        files = {f"{folder}/state": "4: ACTIVE\n", f"{folder}/link_layer": "Ethernet\n"}
        files |= {f"{folder}/gids/{i}": gid + "\n" for i, (gid, _) in enumerate(gids)}
        files |= {f"{folder}/gid_attrs/types/{i}": kind + "\n" for i, (_, kind) in enumerate(gids)}
        return {**files, f"{folder}/gid_attrs/ndevs/0": f"eth-{name}\n", f"sys/class/net/eth-{name}/mtu": f"{mtu}\n"}

    local, v4 = "fe80:0000:0000:0000:0000:0000:0000:0001", "0000:0000:0000:0000:0000:ffff:0a00:0001"
    nothing = "0000:0000:0000:0000:0000:0000:0000:0000"
    good = [(local, "IB/RoCE v1"), (local, "RoCE v2"), (v4, "IB/RoCE v1"), (v4, "RoCE v2"), (nothing, "")]
    found = list(checks.rdma(write(tmp_path, port("a", good, 4200))))
    assert named(found, "GIDs").ok
    assert named(found, "GIDs").value == "a: link-local, v1 IPv4, v2 IPv4"
    assert (named(found, "RDMA packets").ok, named(found, "RDMA packets").value) == (True, "a 4096 bytes")
    found = list(checks.rdma(write(tmp_path, port("b", good[:2], 1500))))
    assert not named(found, "GIDs").ok
    assert "b: no RoCE v2 GID" in named(found, "GIDs").advice
    packets = named(found, "RDMA packets")
    assert (packets.ok, packets.value) == (False, "a 4096 bytes, b 1024 bytes")
    assert "the devices differ" in packets.advice


def test_shared_memory_pages_and_congestion_control(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size advise [never] deny force\n",
            "proc/sys/net/ipv4/tcp_congestion_control": "bbr\n",
            "proc/sys/net/ipv4/tcp_allowed_congestion_control": "bbr\n",
        },
    )
    (pages,) = checks.huge_pages(root)
    assert (pages.ok, pages.value) == (False, "never")
    assert "echo advise" in pages.advice
    (congestion,) = checks.congestion(root)
    assert not congestion.ok
    write(root, {"proc/sys/net/ipv4/tcp_allowed_congestion_control": "bbr reno\n"})
    (congestion,) = checks.congestion(root)
    assert congestion.ok


def test_why_memory_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "try_process_vm", lambda: "process_vm_readv: Operation not permitted")
    yama = write(tmp_path / "yama", {"proc/sys/kernel/yama/ptrace_scope": "1\n"})
    (found,) = checks.process_vm(yama)
    assert (found.ok, found.value) == (False, "Yama: ptrace_scope is 1")
    assert "sysctl kernel.yama.ptrace_scope=0" in found.advice
    seccomp = write(tmp_path / "seccomp", {"proc/self/status": "Name:\tx\nSeccomp:\t2\nSeccomp_filters:\t1\n"})
    (found,) = checks.process_vm(seccomp)
    assert "SYS_PTRACE" in found.advice


def test_this_machine(tmp_path: Path) -> None:
    found = checks.machine()
    names = [check.name for check in found]
    assert len(names) == len(set(names))
    for check in found:
        assert check.value
        assert check.ok or check.advice, check
    command = [sys.executable, "-m", "torch_mooncake", "doctor", "--json"]
    result = subprocess.run(command, capture_output=True, text=True)
    document = json.loads(result.stdout)
    assert (result.returncode, document["ok"]) == (0, True)
    assert [check["name"] for check in document["checks"]][2:] == names
    environment = {"PATH": "/usr/bin", "PYTHONPATH": ":".join(sys.path), "TM_RUNTIME_DIR": str(tmp_path)}
    broken = (
        "import torch_mooncake.node as node; node.EXECUTABLE = '/nowhere'\n"
        "from torch_mooncake.cli import main; raise SystemExit(main(['doctor']))"
    )
    result = subprocess.run([sys.executable, "-c", broken], capture_output=True, text=True, env=environment)
    assert result.returncode == 1
    assert "[!!] node executable: /nowhere is missing" in result.stdout
