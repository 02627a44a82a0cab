"""``tm.topology()``: the Python face of csrc/topology (whose rules are tested in C++ on a tree of an 8-GPU server)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import torch_mooncake as tm


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """A socket with one switch, a GPU and a NIC below it, and a NIC at another host bridge."""

    def device(path: str, pci_class: str, numa: int) -> Path:
        folder = tmp_path / "devices" / path
        folder.mkdir(parents=True)
        for name, text in {"class": pci_class, "vendor": "0x10de", "device": "0x2330", "numa_node": str(numa)}.items():
            (folder / name).write_text(text + "\n")
        devices = tmp_path / "bus/pci/devices"
        devices.mkdir(parents=True, exist_ok=True)
        (devices / folder.name).symlink_to(folder)
        return folder

    def netdev(folder: Path, name: str) -> None:
        net = folder / "net" / name
        net.mkdir(parents=True)
        for file, text in {"operstate": "up", "speed": "100000", "mtu": "9000", "type": "1", "ifindex": "3"}.items():
            (net / file).write_text(text + "\n")
        (net / "device").symlink_to(folder)
        (tmp_path / "class/net").mkdir(parents=True, exist_ok=True)
        (tmp_path / "class/net" / name).symlink_to(net)

    switch = "pci0000:10/0000:10:01.0/0000:11:00.0/"
    device(switch + "0000:12:00.0/0000:13:00.0", "0x030200", 0)
    netdev(device(switch + "0000:12:01.0/0000:14:00.0", "0x020000", 0), "eth0")
    netdev(device("pci0000:20/0000:20:01.0/0000:21:00.0", "0x020000", 1), "eth1")
    for node in (0, 1):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "distance").write_text("10 21\n" if node == 0 else "21 10\n")
    return tmp_path


def test_paths_of_a_fake_tree(sysfs: Path) -> None:
    found = tm.topology(sysfs=str(sysfs))
    assert [nic["name"] for nic in found["nics"]] == ["eth0", "eth1"]
    assert found["nics"][0]["pci"][-1] == "0000:14:00.0"
    assert found["gpu_paths"] == {
        "0000:13:00.0": [{"nic": "eth0", "distance": "PIX"}, {"nic": "eth1", "distance": "SYS"}]
    }
    assert [path["nic"] for path in found["numa_paths"][1]] == ["eth1", "eth0"]


def test_filters_take_part(sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tm.topology(["!eth0"], sysfs=str(sysfs))
    assert [path["nic"] for path in found["gpu_paths"]["0000:13:00.0"]] == ["eth1"]
    assert [nic["used"] for nic in found["nics"]] == [False, True]
    monkeypatch.setenv("TM_NICS", "eth0")
    assert [nic["used"] for nic in tm.topology(sysfs=str(sysfs))["nics"]] == [True, False]
    with pytest.raises(tm.InvalidArgument, match="not an IP address"):
        tm.topology(["10.0.0.0/99"])


def test_this_machine() -> None:
    found = tm.topology()
    loopback = next(nic for nic in found["nics"] if nic["loopback"])
    assert "127.0.0.1/8" in loopback["addresses"]
    assert not loopback["used"]


def test_needs_no_torch() -> None:
    code = "import sys, torch_mooncake as tm; tm.topology(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
