"""This host's node: find it, or start it.

A node is the process that lends memory to the pool and keeps its objects; it listens on
``<runtime_dir>/<pool>/node.sock``. Whoever finds nobody there takes the folder's lock and starts one, as a process of
its own (new session, output to ``node.log``) that outlives its starter and exits when it has had no client for
``linger_s`` seconds. Several processes may do this at once: one starts the node, the others find it.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_mooncake.clock import deadline_ns, seconds_left
from torch_mooncake.config import Config
from torch_mooncake.errors import AuthError, DeadlineExceeded, InvalidArgument, IoError, PeerLost, PoolUnavailable

if TYPE_CHECKING:
    from torch_mooncake import _core

EXECUTABLE = Path(__file__).parent / "bin" / "torch-mooncake-node"
_MAX_SOCKET_PATH = 107
# Detaches the node from us (it is nobody's child) and keeps signals of our terminal away.
_DETACH = ("/bin/sh", "-c", '"$@" & exit 0', "sh")

Connect = Callable[[str, str, int], "_core.Client"]


def pool_dir(config: Config) -> Path:
    """The pool's folder; made, with the runtime folder, as 0700. Refuses folders that others could have prepared."""
    runtime = Path(config.runtime_dir)
    folder = runtime / config.pool
    if len(os.fsencode(folder / "node.sock")) > _MAX_SOCKET_PATH:
        raise InvalidArgument(f"{folder}/node.sock is too long for a Unix socket: set a shorter TM_RUNTIME_DIR")
    for path in (runtime, folder):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            pass
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise AuthError(f"{path} is not a folder")
        if status.st_uid != os.getuid():
            raise AuthError(f"{path} belongs to uid {status.st_uid}, not to us ({os.getuid()}): set TM_RUNTIME_DIR")
        if status.st_mode & 0o077:
            raise AuthError(f"{path} is open to others (mode {stat.S_IMODE(status.st_mode):o}): chmod 700 it")
    return folder


def socket_address(config: Config) -> str:
    return f"unix://{Path(config.runtime_dir) / config.pool / 'node.sock'}"


def pool_token(config: Config) -> str:
    """TM_TOKEN, or what the node wrote in its folder, or ""."""
    if config.token:
        return config.token
    try:
        return (Path(config.runtime_dir) / config.pool / "token").read_text().strip()
    except FileNotFoundError:
        return ""


def find_or_start(config: Config, deadline: int, connect: Connect, store: Any = None) -> _core.Client:
    """Connect to this host's node, after starting it if there is none. PoolUnavailable if it does not start.

    ``store``: where the hosts of one pool find its leader (``torch_mooncake.torchrun``), if the node is started here.
    """
    folder = pool_dir(config)
    client = _try(config, connect, deadline)
    if client is not None:
        return client
    with open(folder / "spawn.lock", "w") as lock:
        _lock(lock.fileno(), deadline, folder)
        client = _try(config, connect, deadline)  # somebody else may have started it while we waited
        if client is not None:
            return client
        from torch_mooncake import torchrun

        cluster = torchrun.cluster(config, deadline, store)
        try:
            ready = start(config, folder, deadline, listen=cluster.listen, leader=cluster.leader, token=cluster.token)
            cluster.publish(ready, pool_token(config))
        except BaseException:
            cluster.give_back()
            raise
    return _connect(config, connect, deadline)


def _try(config: Config, connect: Connect, deadline: int) -> _core.Client | None:
    """A client, or None if nobody listens. A node that answers with an error raises it."""
    path = Path(config.runtime_dir) / config.pool / "node.sock"
    if not path.exists():
        return None
    try:
        return _connect(config, connect, deadline)
    except (PeerLost, IoError):
        return None


def _connect(config: Config, connect: Connect, deadline: int) -> _core.Client:
    """A client of the node that listens. One that is not ready yet (joining its leader) is waited for."""
    while True:
        try:
            return connect(socket_address(config), pool_token(config), deadline)
        except PoolUnavailable:
            if seconds_left(deadline) < 0.1:
                raise
        time.sleep(0.05)


def nobody_listens(address: str) -> bool:
    """Whether the host at ``address`` says that no process has it: a node's keeper listens for as long as the node is
    there, also between two workers. No answer is no."""
    kind, _, place = address.rpartition("://")
    host, _, port = place.rpartition(":")
    try:
        if kind == "unix":
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(1)
                probe.connect(place)
        else:
            socket.create_connection((host.strip("[]"), int(port)), timeout=1).close()
    except (ConnectionRefusedError, FileNotFoundError):
        return True
    except OSError:
        return False
    return False


def _lock(fd: int, deadline: int, folder: Path) -> None:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic_ns() >= deadline:
                raise DeadlineExceeded(f"another process holds {folder}/spawn.lock and starts no node") from None
            time.sleep(0.02)


def arguments(
    config: Config, *, listen: list[str] | None = None, leader: str = "", ready_fd: int | None = None
) -> list[str]:
    """The command line of this host's node (its token travels in TM_TOKEN, not here)."""
    if not EXECUTABLE.exists():
        raise PoolUnavailable(f"{EXECUTABLE} is not there: build the package (pip install .)")
    args = [str(EXECUTABLE), "--runtime-dir", config.runtime_dir, "--pool", config.pool]
    args += ["--linger", str(config.linger_s)]
    if config.memory:
        args += ["--memory", str(config.memory)]
    for ssd in config.ssd:
        args += ["--ssd", ssd]
    args += ["--transports", ",".join(config.transports)]
    if config.nics:
        args += ["--nics", ",".join(config.nics)]
    if config.rdma:
        args += ["--rdma", config.rdma]
    if config.host_id:
        args += ["--host-id", config.host_id]
    if leader:
        args += ["--leader", leader]
    elif config.discovery:
        args += ["--discovery", config.discovery]
    for address in listen or []:
        args += ["--listen", address]
    if ready_fd is not None:
        args += ["--ready-fd", str(ready_fd)]
    return args


def environment(token: str) -> dict[str, str]:
    """The environment of a node: ours, with the token, without what only concerns Python."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON") and key != "TM_DISCOVERY"}
    if token:
        env["TM_TOKEN"] = token
    return env


def start(
    config: Config, folder: Path, deadline: int, *, listen: list[str], leader: str = "", token: str = ""
) -> list[str]:
    """Start the node and return the addresses it is ready at. Called with the folder's spawn.lock held.

    ``token``: what the cluster agreed on, for this host's processes to find in the folder.
    """
    if token and not config.token:
        _write_token(folder, token)
    deadline = min(deadline, deadline_ns(config.start_timeout_s))
    reader, writer = os.pipe()
    try:
        args = arguments(config, listen=listen, leader=leader, ready_fd=writer)
        with open(folder / "node.log", "ab") as log:
            subprocess.run(
                [*_DETACH, *args],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(writer,),
                start_new_session=True,
                env=environment(config.token),
                cwd="/",
                check=True,
            )
        os.close(writer)
        writer = -1
        line = _read_line(reader, deadline, folder)
    finally:
        os.close(reader)
        if writer >= 0:
            os.close(writer)
    kind, _, text = line.partition(" ")
    if kind == "ready":
        return text.split()
    raise PoolUnavailable(f"the node did not start: {text if kind == 'error' else line!r}{_log_tail(folder)}")


def _write_token(folder: Path, token: str) -> None:
    fresh = folder / "token.fresh"
    fresh.unlink(missing_ok=True)
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token + "\n")
    fresh.rename(folder / "token")


def _read_line(fd: int, deadline: int, folder: Path) -> str:
    data = b""
    while b"\n" not in data:
        ready, _, _ = select.select([fd], [], [], seconds_left(deadline))
        if not ready:
            raise PoolUnavailable(f"the node was not ready in time{_log_tail(folder)}")
        chunk = os.read(fd, 4096)
        if not chunk:
            raise PoolUnavailable(f"the node ended before it was ready{_log_tail(folder)}")
        data += chunk
    return data.split(b"\n")[0].decode(errors="replace")


def _log_tail(folder: Path) -> str:
    try:
        lines = (folder / "node.log").read_text(errors="replace").splitlines()[-8:]
    except OSError:
        return ""
    return "".join(f"\n    {line}" for line in (f"last lines of {folder}/node.log:", *lines)) if lines else ""
