"""A virtual machine with Soft-RoCE devices: runs a shell command in it, on this machine's files.

    python tests/rdma/vm/vm.py [--keep FOLDER] [--seconds N] COMMAND

QEMU emulates the processor (no KVM is needed, and none is looked for), so everything in there is ten to twenty times
slower than outside. The command sees this machine's files (what it writes is in memory, and gone afterwards), the
working directory, and a folder /out that stays (``--keep``). Its output is ours, its exit status too, but for these,
which are never its own (1 then stands for its status):

    77   this machine cannot have one: QEMU or a tool is missing, or the kernel package cannot be had; says which
    124  it took longer than --seconds
    125  the virtual machine failed; says where its console's log is

The kernel is Debian's package, unpacked (never installed) into build/rdma-vm/ on first use, and again when KERNELS
changes; the initial file system is made again when anything it is made of changes.
"""

from __future__ import annotations

import argparse
import hashlib
import lzma
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
CACHE = Path(os.environ.get("TM_RDMA_VM_CACHE") or ROOT / "build" / "rdma-vm")
KERNELS = ("linux-image-6.12-amd64", "linux-image-amd64")  # the first that this Debian has
MODULES = (
    *("virtio_pci", "virtio_console", "virtio_rng", "9pnet_virtio", "9p", "overlay", "veth", "sch_netem"),
    *("crc32_generic", "rdma_rxe", "ib_uverbs", "rdma_ucm"),  # rxe needs the first, and depends on nothing that says so
)
TOOLS = {  # and the packages they are in
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "cpio": "cpio",
    "modprobe": "kmod",
    "zstd": "zstd",
    "rdma": "iproute2",
    "dpkg": "dpkg",
    "apt-get": "apt",
}
PASSED_ON = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG")
SKIP, LATE, FAILED = 77, 124, 125


class Unavailable(Exception):
    """Why this machine cannot run one."""


def missing_tools() -> list[str]:
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    return [package for tool, package in TOOLS.items() if shutil.which(tool, path=path) is None]


def check() -> None:
    """Raises Unavailable if something is missing that prepare() does not fetch."""
    if os.uname().machine != "x86_64":
        raise Unavailable(f"the recipe is for x86_64, not {os.uname().machine}")
    if missing := missing_tools():
        raise Unavailable(f"missing packages: {' '.join(sorted(missing))}")


def prepare() -> tuple[Path, Path]:
    """Kernel and initial file system, made if they are not there. Raises Unavailable."""
    check()
    kernel, files = CACHE / "vmlinux", CACHE / "initramfs"
    wanted = " ".join(KERNELS)
    if not is_made(kernel, wanted):
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            unpack_kernel(fetch_kernel(Path(folder)), Path(folder))
        say_made(kernel, wanted)
    wanted = initramfs_is_made_of()
    if not is_made(files, wanted):
        make_initramfs(files)
        say_made(files, wanted)
    return kernel, files


def is_made(target: Path, wanted: str) -> bool:
    """Whether it is there, made of that."""
    said = target.with_suffix(".of")
    return target.exists() and said.exists() and said.read_text() == wanted


def say_made(target: Path, of: str) -> None:
    target.with_suffix(".of").write_text(of)


def initramfs_is_made_of() -> str:
    """A digest of our init, of the recipe (this file), and of the kernel whose modules go in."""
    digest = hashlib.sha256(" ".join(MODULES).encode())
    for path in (HERE / "init", Path(__file__)):
        digest.update(path.read_bytes())
    kernel = (CACHE / "vmlinux").stat()
    digest.update(f"{kernel.st_size} {kernel.st_mtime_ns} {modules_version()}".encode())
    return digest.hexdigest()


def modules_version() -> str:
    return next((CACHE / "lib/modules").iterdir()).name


def fetch_kernel(folder: Path) -> Path:
    for name in KERNELS:
        said = subprocess.run(["apt-cache", "depends", name], capture_output=True, text=True).stdout
        if found := re.search(r"Depends: (linux-image-[0-9]\S*)", said):
            command = ["apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", found[1]]
            got = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            if packages := list(folder.glob("*.deb")):
                return packages[0]
            raise Unavailable(f"apt-get download {found[1]}: {got.stderr.strip()[-300:]}")
    raise Unavailable(f"apt knows none of {', '.join(KERNELS)} (apt-get update)")


def unpack_kernel(package: Path, folder: Path) -> None:
    """The ELF image, which QEMU starts without the decompressor (that alone takes 10 s), and all modules."""
    subprocess.run(["dpkg", "-x", package, folder / "package"], check=True)
    image = next((folder / "package/boot").glob("vmlinuz-*")).read_bytes()
    (folder / "vmlinux").write_bytes(decompress(image))
    modules = next((folder / "package/lib/modules").iterdir())
    if not (modules / "modules.dep").exists():
        subprocess.run(["/sbin/depmod", "-b", folder / "package", modules.name], check=True)
    shutil.rmtree(CACHE / "lib", ignore_errors=True)
    shutil.move(folder / "package/lib", CACHE / "lib")
    os.replace(folder / "vmlinux", CACHE / "vmlinux")


def decompress(image: bytes) -> bytes:
    for magic, command in ((b"\xfd7zXZ\0", ["xz", "-dc"]), (b"\x28\xb5\x2f\xfd", ["zstd", "-dcq"])):
        at = image.find(magic)
        while at >= 0:  # the magic may turn up by chance
            # What follows the compressed part makes the tool fail after it has written it all.
            out = subprocess.run(command, input=image[at:], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout
            if out.startswith(b"\x7fELF"):
                return out
            at = image.find(magic, at + 1)
    raise Unavailable("no ELF image in the kernel package: neither xz nor zstd")


def make_initramfs(target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=CACHE) as name:
        root = Path(name)
        for folder in ("bin", "modules", "proc", "sys", "dev", "host", "layer", "system"):
            (root / folder).mkdir()
        shutil.copy(shutil.which("busybox") or "/bin/busybox", root / "bin/busybox")
        shutil.copy(HERE / "init", root / "init")
        (root / "init").chmod(0o755)
        version = modules_version()
        order: list[str] = []
        for module in MODULES:
            command = ["/sbin/modprobe", "-d", CACHE, "-S", version, "--show-depends", module]
            said = subprocess.run(command, capture_output=True, text=True).stdout
            for path in (Path(line.split()[1]) for line in said.splitlines() if line.startswith("insmod ")):
                plain = path.name.removesuffix(".xz")
                if plain in order:
                    continue
                data = path.read_bytes()
                (root / "modules" / plain).write_bytes(lzma.decompress(data) if path.suffix == ".xz" else data)
                order.append(plain)
        (root / "modules/order").write_text("".join(f"{name}\n" for name in order))
        archive = root.with_suffix(".cpio")
        with open(archive, "wb") as out:
            listing = subprocess.run(["find", "."], cwd=root, capture_output=True, check=True).stdout
            command = ["cpio", "-o", "-H", "newc", "-R", "0:0", "--quiet"]
            subprocess.run(command, cwd=root, input=listing, stdout=out, check=True)
        os.replace(archive, target)


def run(command: str, out: Path, seconds: float) -> int:
    kernel, files = prepare()
    for name in ("rc", "dmesg", "network.log", "console.log"):
        (out / name).unlink(missing_ok=True)
    shutil.copy(HERE / "network", out / "network")
    passed = [f"export {name}={shlex.quote(os.environ[name])}" for name in PASSED_ON if name in os.environ]
    passed += [f"export {name}={shlex.quote(value)}" for name, value in os.environ.items() if name.startswith("TM_")]
    lines = [*passed, "export HOME=/root", f"cd {shlex.quote(os.getcwd())}", command, ""]
    (out / "job").write_text("\n".join(lines))
    # The port writes into a pipe, not into the console: no line ends are changed, and it cannot block for ever.
    job, write = os.pipe()
    errors = open(out / "qemu.err", "w")  # noqa: SIM115
    machine = subprocess.Popen(
        [
            "qemu-system-x86_64",
            *("-M", "q35", "-accel", "tcg,thread=multi,tb-size=1024", "-cpu", "max", "-smp", "2", "-m", "4G"),
            *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
            *("-serial", f"file:{out / 'console.log'}", "-kernel", str(kernel), "-initrd", str(files), "-append"),
            "console=ttyS0 quiet loglevel=4 panic=-1 oops=panic mitigations=off nokaslr tsc=reliable no_timer_check",
            *("-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap"),
            *("-device", "virtio-9p-pci,fsdev=host,mount_tag=host"),
            *("-fsdev", f"local,id=out,path={out},security_model=none"),
            *("-device", "virtio-9p-pci,fsdev=out,mount_tag=out"),
            *("-chardev", f"file,id=job,path=/dev/fd/{write}", "-device", "virtio-serial-pci"),
            *("-device", "virtserialport,chardev=job,name=job"),
            *("-object", "rng-random,id=random,filename=/dev/urandom", "-device", "virtio-rng-pci,rng=random"),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        pass_fds=[write],
    )
    errors.close()
    os.close(write)
    reader = subprocess.Popen(["cat"], stdin=job)
    os.close(job)
    try:
        machine.wait(seconds)
    except subprocess.TimeoutExpired:
        print(f"vm.py: not done after {seconds:g} s; console: {out / 'console.log'}", file=sys.stderr)
        return LATE
    finally:  # also of Ctrl-C
        machine.kill()
        machine.wait()
        reader.wait()
    if (out / "rc").exists():
        return status_of(int((out / "rc").read_text()))
    print(f"vm.py: the virtual machine failed; console: {out / 'console.log'}", file=sys.stderr)
    for name in ("console.log", "qemu.err"):
        print((out / name).read_text(errors="replace")[-2000:], file=sys.stderr)
    return FAILED


def status_of(command: int) -> int:
    """Our exit status for the command's: one that says something else of us is told in words."""
    if command not in (SKIP, LATE, FAILED):
        return command
    print(f"vm.py: the command's exit status was {command}", file=sys.stderr)
    return 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="/out of the machine, with its logs")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--check", action="store_true", help="run nothing: are the tools there?")
    parser.add_argument("command", nargs="?", default="")
    args = parser.parse_args()
    try:
        if args.check:
            check()
            return 0
        if args.keep:
            args.keep.mkdir(parents=True, exist_ok=True)
            return run(args.command, args.keep.resolve(), args.seconds)
        with tempfile.TemporaryDirectory(prefix="rdma-vm-") as folder:
            return run(args.command, Path(folder), args.seconds)
    except Unavailable as why:
        print(f"No virtual machine with RDMA devices here: {why}", file=sys.stderr)
        return SKIP


if __name__ == "__main__":
    sys.exit(main())
