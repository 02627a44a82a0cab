"""What ``torch-mooncake doctor`` says of RDMA devices: providers, GIDs, MTU, firewall, and whether bytes arrive."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from torch_mooncake.cli.checks import Check

ROCE_PORT = 4791  # UDP, of RoCE v2
HEADERS = 72  # of RoCE v2 in an Ethernet frame, at most, beside the payload
PACKETS = (4096, 2048, 1024, 512, 256)


def devices(root: Path, names: list[str]) -> Iterator[Check]:
    """Of the devices that the kernel has."""
    if root == Path("/"):
        yield from _providers(names)
    folders = [port for name in names for port in sorted((root / f"sys/class/infiniband/{name}/ports").glob("*"))]
    ethernet = [port for port in folders if _text(port / "link_layer") == "Ethernet"]
    if ethernet:
        yield _gids(ethernet)
        yield from _mtu(root, ethernet)
        yield from _firewall(root, names)
    if root == Path("/"):
        yield _loopback()


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # the kernel answers reads of unset entries with an error
        return ""


def _providers(names: list[str]) -> Iterator[Check]:
    """The kernel's part of a driver is of no use without its part in user space."""
    try:
        library = ctypes.CDLL("libibverbs.so.1")
    except OSError:
        return  # told elsewhere
    library.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
    library.ibv_get_device_name.restype = ctypes.c_char_p
    count = ctypes.c_int()
    found = library.ibv_get_device_list(ctypes.byref(count))
    usable = {library.ibv_get_device_name(ctypes.c_void_p(found[i])).decode() for i in range(count.value)}
    if found:
        library.ibv_free_device_list(found)
    lacking = [name for name in names if name not in usable]
    yield Check(
        "RDMA providers",
        not lacking,
        f"none for {', '.join(lacking)}" if lacking else f"for {', '.join(names)}",
        "the driver's part in user space is missing: apt install ibverbs-providers (or the vendor's package); in a "
        "container, install it there",
    )


def _gids(ports: list[Path]) -> Check:
    """RoCE needs an IP address on the interface: without one there is only a link-local GID, which is not routed."""
    words, poor = [], []
    for port in ports:
        kinds: dict[str, None] = {}
        for gid in sorted((port / "gids").glob("*"), key=lambda path: int(path.name)):
            address = _text(gid)
            if not address or set(address) <= set("0:"):
                continue
            kind = _text(port / "gid_attrs/types" / gid.name).replace("IB/RoCE v1", "v1").replace("RoCE v2", "v2")
            family = "IPv4" if address.startswith("0000:0000:0000:0000:0000:ffff:") else "IPv6"
            kinds["link-local" if address.startswith("fe80") else f"{kind} {family}"] = None
        name = port.parts[-3]
        words.append(f"{name}: {', '.join(kinds) or 'none'}")
        if not any(kind.startswith("v2") for kind in kinds):
            poor.append(name)
    return Check(
        "GIDs",
        not poor,
        "; ".join(words),
        f"{', '.join(poor)}: no RoCE v2 GID but link-local; give the interface an IP address (ip addr add)",
    )


def _mtu(root: Path, ports: list[Path]) -> Iterator[Check]:
    """The payload of a packet follows from the MTU of the interface."""
    sizes: dict[str, int] = {}
    for port in ports:
        interface = next(filter(None, (_text(path) for path in (port / "gid_attrs/ndevs").glob("*"))), "")
        mtu = _text(root / f"sys/class/net/{interface}/mtu") if interface else ""
        if mtu:
            sizes[port.parts[-3]] = next((size for size in PACKETS if size + HEADERS <= int(mtu)), PACKETS[-1])
    if not sizes:
        return
    differ = len(set(sizes.values())) > 1
    advice = (
        "the devices differ: peers use the smaller size of the two ends; give all interfaces one MTU"
        if differ
        else "larger packets cost less: ip link set dev NAME mtu 4200 at both ends. Switches that carry less drop them "
        "silently; connections then fail with 'transport retry counter exceeded' (TM_RDMA=mtu=1024 gets round it)"
    )
    yield Check(
        "RDMA packets",
        not differ and set(sizes.values()) == {4096},
        ", ".join(f"{name} {size} bytes" for name, size in sizes.items()),
        advice,
    )


def _firewall(root: Path, names: list[str]) -> Iterator[Check]:
    """NICs with RoCE in hardware do not ask the kernel's firewall; Soft-RoCE does."""
    soft = [name for name in names if not (root / f"sys/class/infiniband/{name}/device").exists()]
    tool = shutil.which("iptables-save", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if not soft or tool is None or os.geteuid() != 0 or root != Path("/"):
        return
    said = subprocess.run([tool], capture_output=True, text=True, timeout=10, check=False).stdout
    closed = ":INPUT DROP" in said or "-A INPUT -j DROP" in said or "-A INPUT -j REJECT" in said
    yield Check(
        "firewall",
        not closed or f"--dport {ROCE_PORT}" in said,
        "closed for what it does not name" if closed else f"lets UDP port {ROCE_PORT} in",
        f"RoCE v2 is UDP port {ROCE_PORT}; root: iptables -I INPUT -p udp --dport {ROCE_PORT} -j ACCEPT",
    )


def _loopback() -> Check:
    """Two engines of this process, with the settings as they are: does a write arrive?"""
    from torch_mooncake.config import Config
    from torch_mooncake.errors import Error
    from torch_mooncake.transfer import Engine

    config = Config.from_env()
    advice = "what it says; TM_NICS chooses devices, TM_RDMA has the settings (docs/rdma.md)"
    try:
        with (
            Engine(transports=("rdma",), name="doctor", token="doctor") as here,
            Engine(transports=("rdma",), name="patient", token="doctor") as there,
        ):
            sent, arrived = bytearray(os.urandom(1 << 16)), bytearray(1 << 16)
            remote = here.connect(there.addresses[0], 10).open(there.register(arrived).descriptor(), 10)
            here.write(here.register(sent), remote, timeout=10).wait()
            rails = [lane["rail"] for lane in here.stats()["lanes"] if lane["alive"] and lane["transport"] == "rdma"]
            ok = sent == arrived
    except Error as error:
        return Check("RDMA write to ourselves", False, str(error), advice)
    chosen = f" (TM_NICS={','.join(config.nics)})" if config.nics else ""
    return Check("RDMA write to ourselves", ok, f"arrived, over {', '.join(rails)}{chosen}", advice)
