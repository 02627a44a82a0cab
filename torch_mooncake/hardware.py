"""This host's NICs, GPUs and NUMA nodes, and which NICs are nearest to which memory.

paths = tm.topology()["gpu_paths"]["0000:1a:00.0"]      # [{"nic": "eth4", "distance": "PIX"}, …], nearest first
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def topology(nics: Sequence[str] | None = None, *, sysfs: str = "/sys") -> dict[str, Any]:
    """What this host consists of, read now.

    ``nics``: patterns as for ``Engine(nics=…)``; those that do not match are listed with ``used`` false and take no
    part in the paths. Default: ``$TM_NICS``. ``sysfs``: another root than ``/sys``; its interfaces are listed then.

    Keys: ``nics`` (name, up, loopback, used, speed_mbps (0: unknown), mtu, numa_node (-1: unknown), mac, addresses,
    pci (host bridge first), rdma_devices), ``gpus`` (bus_id, vendor, device, numa_node, pci), ``numa_nodes`` (id,
    cpus, memory_nbytes, distances), ``gpu_paths`` (by bus id) and ``numa_paths`` (by node): lists of ``{"nic",
    "distance"}``, nearest first. Distances: PIX (one PCIe switch), PXB (several), PHB (one host bridge), NODE, SYS.

    What sysfs does not say is unknown, never an error. InvalidArgument for a malformed pattern.
    """
    from torch_mooncake import _core
    from torch_mooncake.config import Config

    return _core.topology(sysfs, list(Config.from_env(nics=nics).nics))
