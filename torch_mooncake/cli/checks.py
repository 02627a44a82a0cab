"""What ``torch-mooncake doctor`` looks at: one function a subject, each returns what is so and what to do about it.

Every check tries the thing itself where that is cheap and leaves nothing behind (reading another process' memory,
making a ring), and reads the kernel's files where it is not. ``root`` is another ``/`` for tests.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import mmap
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch_mooncake.cli import human
from torch_mooncake.config import parse_bytes

_SYS_IO_URING_SETUP = 425


@dataclasses.dataclass
class Check:
    name: str
    ok: bool
    value: str
    advice: str = ""  # what to do if not ok
    required: bool = False  # nothing works without it


def machine(root: Path = Path("/")) -> list[Check]:
    """All checks of this machine, in the order in which they are shown."""
    checks = (memory, nics, rdma, cuda, huge_pages, files, process_vm, io_uring, congestion)
    return [check for make in checks for check in make(root)]


def _read(root: Path, path: str) -> str | None:
    try:
        return (root / path.lstrip("/")).read_text().strip()
    except OSError:
        return None


def memory(root: Path) -> Iterator[Check]:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = cgroup_memory_limit(root)
    value = f"{human(total)}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} CPUs"
    if limit is not None and limit < total:
        value += f", cgroup limit {human(limit)}"
    enough = min(total, limit or total) >= 1 << 30
    yield Check("memory", enough, value, "a node lends a quarter of what the cgroup allows: raise memory.max")


def cgroup_memory_limit(root: Path) -> int | None:
    """The lowest limit of the groups this process is in (version 1 or 2); None without one."""
    limits: list[int] = []
    for line in (_read(root, "/proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, name = "/sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, name = "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        parts = [p for p in path.split("/") if p and p != ".."]
        for depth in range(len(parts) + 1):
            text = _read(root, "/".join([base, *parts[:depth], name]))
            if text and text.isdigit() and int(text) < 1 << 60:
                limits.append(int(text))
    return min(limits, default=None)


def nics(root: Path) -> Iterator[Check]:
    from torch_mooncake.hardware import topology

    here = topology() if root == Path("/") else topology(sysfs=str(root / "sys"))
    used = [nic for nic in here["nics"] if nic["used"]]
    words = []
    for nic in used:
        speed = f"{nic['speed_mbps'] / 1000:g} Gbit/s" if nic["speed_mbps"] else "speed unknown"
        numa = f", NUMA node {nic['numa_node']}" if nic["numa_node"] >= 0 else ""
        words.append(f"{nic['name']} ({speed}, MTU {nic['mtu']}{numa})")
    yield Check(
        "network interfaces",
        bool(used),
        ", ".join(words) or "none but loopback",
        "peers on other hosts cannot be reached: bring an interface up, or check TM_NICS",
    )
    small = [nic["name"] for nic in used if nic["speed_mbps"] >= 10_000 and 0 < nic["mtu"] < 9000]
    if small:
        advice = (
            "jumbo frames save CPU at 10 Gbit/s and above; root: ip link set dev NAME mtu 9000 (both ends, switches)"
        )
        yield Check("MTU of fast interfaces", False, f"{', '.join(small)} below 9000", advice)


def rdma(root: Path) -> Iterator[Check]:
    folder = root / "sys/class/infiniband"
    devices = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    if not devices:
        yield Check("RDMA devices", True, "none: TCP carries what goes to other hosts")
        return
    ports = [port for device in devices for port in sorted((folder / device / "ports").glob("*"))]
    down = [f"{p.parts[-3]}/{p.name}" for p in ports if "ACTIVE" not in (_read(p, "state") or "")]
    yield Check(
        "RDMA devices",
        len(down) < len(ports),
        ", ".join(devices) + (f"; ports that are down: {', '.join(down)}" if down else ""),
        "no port is ACTIVE: check the cable, and `rdma link`",
    )
    try:
        ctypes.CDLL("libibverbs.so.1")
        yield Check("libibverbs", True, "loads")
    except OSError as error:
        yield Check("libibverbs", False, str(error), "install the user-space part: apt install ibverbs-providers")
    nodes = [p for p in (root / "dev/infiniband").glob("uverbs*") if os.access(p, os.R_OK | os.W_OK)]
    advice = "a container needs --device=/dev/infiniband; else check the group of /dev/infiniband/uverbs*"
    yield Check("access to RDMA devices", bool(nodes), f"{len(nodes)} of /dev/infiniband/uverbs*", advice)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield Check(
        "locked memory",
        soft in (resource.RLIM_INFINITY, -1),
        "unlimited" if soft in (resource.RLIM_INFINITY, -1) else human(soft),
        "NICs lock what is registered: ulimit -l unlimited (limits.conf: memlock; systemd: LimitMEMLOCK=infinity)",
    )
    from torch_mooncake.cli import rdma_checks

    yield from rdma_checks.devices(root, devices)


def cuda(root: Path) -> Iterator[Check]:
    present = (root / "proc/driver/nvidia/version").exists() or (root / "dev/nvidia0").exists()
    try:
        version = ctypes.c_int()
        # Needs no cuInit: makes no context.
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
        yield Check("CUDA driver", True, f"CUDA {version.value // 1000}.{version.value % 1000 // 10}")
        yield from _direct_storage(root)
    except (OSError, AttributeError) as error:
        if present:
            advice = (
                "the kernel has the driver, we have no library: containers need --gpus all (nvidia-container-toolkit)"
            )
            yield Check("CUDA driver", False, str(error), advice)
        else:
            yield Check("CUDA driver", True, "none: only CPU tensors")


def _direct_storage(root: Path) -> Iterator[Check]:
    try:
        ctypes.CDLL("libcufile.so.0")  # opens no driver
    except OSError:
        yield Check("GPUDirect Storage", True, "no libcufile: pinned memory between files and devices")
        return
    loaded = (root / "proc/driver/nvidia-fs").exists()
    value = "libcufile and nvidia-fs" if loaded else "libcufile, no nvidia-fs: cuFile reads through host memory itself"
    yield Check("GPUDirect Storage", loaded, value, "load the nvidia-fs kernel module: modprobe nvidia_fs")


def huge_pages(root: Path) -> Iterator[Check]:
    text = _read(root, "/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    chosen = text[text.find("[") + 1 : text.find("]")] if text and "[" in text else "unknown"
    yield Check(
        "shared-memory huge pages",
        chosen in ("advise", "always", "within_size", "force"),
        chosen,
        "zero-copy reads fault on 4 KiB pages; root: echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
    )


def files(root: Path) -> Iterator[Check]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    more = (
        ""
        if hard in (-1, resource.RLIM_INFINITY) or hard >= 4096
        else "; the hard limit needs root (limits.conf: nofile)"
    )
    advice = f"each peer takes up to six: ulimit -n 65536{more}"
    yield Check("open files", soft in (-1, resource.RLIM_INFINITY) or soft >= 4096, f"{soft} (at most {hard})", advice)


def ssds(folders: Iterable[str]) -> Iterator[Check]:
    """``PATH:SIZE`` of each SSD folder: may we write there, past the page cache, and is there room?"""
    for entry in folders:
        path, _, size = entry.rpartition(":")
        folder = Path(path)
        place = folder if folder.is_dir() else folder.parent
        name = f"SSD {path}"
        if not os.access(place, os.R_OK | os.W_OK | os.X_OK):
            yield Check(name, False, f"{place} is not there or not ours to write", f"mkdir -m 700 {path}; chown it")
            continue
        usage = os.statvfs(place)
        used = sum(f.stat().st_blocks * 512 for f in folder.glob("segment-*"))
        free = usage.f_bavail * usage.f_frsize + used
        wanted = parse_bytes(size)
        direct = try_direct_io(place)
        value = f"{human(wanted)} of {human(free)} free, {'O_DIRECT' if direct else 'through the page cache'}"
        if free < wanted:
            yield Check(name, False, value, "the log will do with less: free the disk, or lower the size")
        else:
            advice = "this file system has no O_DIRECT: reads and writes pass through memory; use ext4 or xfs"
            yield Check(name, direct, value, advice)


def try_direct_io(folder: Path) -> bool:
    try:
        fd, name = tempfile.mkstemp(prefix=".tm-doctor-", dir=folder)
    except OSError:
        return False
    try:
        os.ftruncate(fd, 4096)
        direct = os.open(name, os.O_RDONLY | os.O_DIRECT)
        try:
            os.preadv(direct, [mmap.mmap(-1, 4096)], 0)
        finally:
            os.close(direct)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
        os.unlink(name)


def process_vm(root: Path) -> Iterator[Check]:
    """A process started here is read, as an engine would read a peer of the same user."""
    error = try_process_vm()
    if error is None:
        yield Check("reading a neighbour's memory", True, "process_vm_readv is permitted")
        return
    scope = _read(root, "/proc/sys/kernel/yama/ptrace_scope") or "0"
    status = _read(root, "/proc/self/status") or ""
    filtered = any(line.split()[1] == "2" for line in status.splitlines() if line.startswith("Seccomp:"))
    if scope != "0":
        reason, advice = f"Yama: ptrace_scope is {scope}", "root: sysctl kernel.yama.ptrace_scope=0"
    elif filtered:
        reason = f"{error}; a seccomp filter is on"
        advice = "containers: --cap-add=SYS_PTRACE or a seccomp profile that allows process_vm_readv"
    else:
        reason, advice = error, "peers must be of the same user and not setuid"
    advice = f"memory that is not shared goes over Unix sockets, at less than half the speed; {advice}"
    yield Check("reading a neighbour's memory", False, reason, advice)


def try_process_vm() -> str | None:
    """None if a process of this user may read another one, else why not.

    Yama's mode 1 lets a process read its descendants only, so the child reads us.
    """
    code = (
        "import ctypes, sys\n"
        "class V(ctypes.Structure): _fields_ = [('base', ctypes.c_void_p), ('len', ctypes.c_size_t)]\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "buffer = ctypes.create_string_buffer(8)\n"
        "here, there = V(ctypes.addressof(buffer), 8), V(int(sys.argv[2]), 8)\n"
        "n = libc.process_vm_readv(int(sys.argv[1]), ctypes.byref(here), 1, ctypes.byref(there), 1, 0)\n"
        "print(0 if n == 8 and buffer.raw == b'mooncake' else ctypes.get_errno() or -1)"
    )
    secret = ctypes.create_string_buffer(b"mooncake", 8)
    arguments = [sys.executable, "-S", "-c", code, str(os.getpid()), str(ctypes.addressof(secret))]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=20, check=True)
    number = int(result.stdout)
    return None if number == 0 else f"process_vm_readv: {os.strerror(number) if number > 0 else 'other bytes'}"


def io_uring(root: Path) -> Iterator[Check]:
    libc = ctypes.CDLL(None, use_errno=True)
    params = ctypes.create_string_buffer(120)  # struct io_uring_params, zeroed
    fd = libc.syscall(_SYS_IO_URING_SETUP, 4, params)
    if fd >= 0:
        os.close(fd)
        yield Check("io_uring", True, "permitted")
        return
    number = ctypes.get_errno()
    if number == errno.ENOSYS:
        advice = "a seccomp profile (containers block it by default) or an old kernel: files are read by pread threads"
    elif (_read(root, "/proc/sys/kernel/io_uring_disabled") or "0") != "0":
        advice = "files are read by pread threads; root: sysctl kernel.io_uring_disabled=0"
    else:
        advice = "files are read by pread threads; containers need a seccomp profile that allows io_uring"
    yield Check("io_uring", False, os.strerror(number), advice)


def congestion(root: Path) -> Iterator[Check]:
    default = _read(root, "/proc/sys/net/ipv4/tcp_congestion_control") or "unknown"
    allowed = (_read(root, "/proc/sys/net/ipv4/tcp_allowed_congestion_control") or default).split()
    ok = default != "bbr" or any(name in allowed for name in ("reno", "cubic"))
    setting = "net.ipv4.tcp_allowed_congestion_control"
    advice = f"bbr halves loopback and nothing else is allowed; root: sysctl {setting}='reno bbr'"
    yield Check("TCP congestion control", ok, f"{default} (allowed: {' '.join(allowed)})", advice)
