"""All settings, in one place. Each can be set by an environment variable and is validated when it is read."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch_mooncake.errors import InvalidArgument

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_POOL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def parse_bytes(value: int | str) -> int:
    """A number of bytes: ``1073741824``, ``"64MiB"``, ``"4G"`` (units are powers of 1024)."""
    if isinstance(value, int) and not isinstance(value, bool):
        nbytes = value
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", str(value), re.IGNORECASE)
        if not match:
            raise InvalidArgument(f"not a number of bytes: {value!r} (examples: 64MiB, 4G, 1073741824)")
        nbytes = int(float(match[1]) * _UNITS[match[2].upper()])
    if nbytes < 0:
        raise InvalidArgument(f"a number of bytes cannot be negative: {value!r}")
    return nbytes


def default_runtime_dir() -> str:
    """``$XDG_RUNTIME_DIR/torch_mooncake``, or ``/tmp/torch_mooncake-<uid>`` where the system has no such folder."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and os.path.isdir(base) and os.access(base, os.W_OK):
        return os.path.join(base, "torch_mooncake")
    return f"/tmp/torch_mooncake-{os.getuid()}"


def default_pool() -> str:
    """``default``; inside torchrun a name of the run, so that two runs on a host never share a pool."""
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    if not run:
        return "default"
    if run == "none":  # torchrun without --rdzv-id: tell runs apart by their port
        run = f"port-{os.environ.get('MASTER_PORT', '0')}"
    return "run-" + re.sub(r"[^A-Za-z0-9._-]", "_", run)[:59]


def _env(name: str, default: Any, doc: str) -> Any:
    """A field that ``$name`` sets; ``default`` is a value or a function that makes it."""
    metadata = {"env": name, "doc": doc}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Config:
    """The settings of a process. ``Config.from_env(pool="x")``: what is given wins over the environment."""

    address: str = _env("TM_ADDRESS", "", "node to use, host:port; empty: this host's node")
    runtime_dir: str = _env("TM_RUNTIME_DIR", default_runtime_dir, "folder (0700) of this host's nodes")
    pool: str = _env("TM_POOL", default_pool, "name of this host's pool")
    discovery: str = _env(
        "TM_DISCOVERY", "", "etcd://host:port[,…][/prefix]: where a node started here and others elect their leader"
    )
    token: str = _env("TM_TOKEN", "", "secret of the pool; empty: the one in its folder")
    memory: int = _env("TM_MEMORY", 0, "bytes a node started here lends; 0: a quarter of what the cgroup allows")
    ssd: tuple[str, ...] = _env(
        "TM_SSD", (), "PATH:SIZE of folders on SSDs for what a node started here has no memory for"
    )
    linger_s: float = _env("TM_LINGER_S", 60.0, "a node started here exits this long after its last client; <0: never")
    host_id: str = _env("TM_HOST_ID", "", "what makes two processes neighbours; empty: the boot id")
    name: str = _env("TM_NAME", "", "how this process is called in messages; empty: client-<pid>")
    start_timeout_s: float = _env("TM_START_TIMEOUT_S", 20.0, "how long a node may take to start")
    view_ttl_s: float = _env("TM_VIEW_TTL_S", 1.0, "cached locations are used while the view is younger")
    transports: tuple[str, ...] = _env("TM_TRANSPORTS", ("local", "shm", "tcp"), "transports allowed, best first")
    nics: tuple[str, ...] = _env("TM_NICS", (), 'NICs used: globs of names and networks, "!" excludes; empty: all')
    rdma: str = _env("TM_RDMA", "", "settings of the transport rdma: name=value,… (docs/rdma.md)")
    lanes: int = _env("TM_LANES", 2, "connections a peer")
    io_threads: int = _env("TM_IO_THREADS", 2, "I/O threads an engine")
    async_threads: int = _env("TM_ASYNC_THREADS", 128, "the most threads for the await forms of the pool's verbs")
    log_level: str = _env("TM_LOG_LEVEL", "warning", "debug, info, warning, error or off")

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, what: str) -> None:
            if not ok:
                env = self.__dataclass_fields__[name].metadata["env"]
                raise InvalidArgument(f"{name} ({env}) must be {what}, not {getattr(self, name)!r}")

        require(os.path.isabs(self.runtime_dir), "runtime_dir", "an absolute path")
        require(bool(_POOL_NAME.fullmatch(self.pool)), "pool", "1 to 64 letters, digits, dots, dashes, underscores")
        require("\n" not in self.token and len(self.token) <= 1024, "token", "one line of at most 1024 characters")
        require(self.memory == 0 or self.memory >= 1 << 20, "memory", "0 or at least 1 MiB")
        for entry in self.ssd:
            path, _, size = entry.rpartition(":")
            require(os.path.isabs(path) and parse_bytes(size) >= 64 << 20, "ssd", "PATH:SIZE, 64 MiB at least, each")
        require(self.linger_s == self.linger_s, "linger_s", "a number of seconds")
        require(0 < self.start_timeout_s <= 600, "start_timeout_s", "above 0 and at most 600")
        require(0 <= self.view_ttl_s <= 4, "view_ttl_s", "between 0 and 4: a node's lease is 5 seconds")
        require(bool(self.transports) and all(self.transports), "transports", "names separated by commas")
        require(all(self.nics), "nics", "patterns separated by commas")
        require(1 <= self.lanes <= 64, "lanes", "between 1 and 64")
        require(1 <= self.io_threads <= 4, "io_threads", "between 1 and 4")
        require(1 <= self.async_threads <= 1024, "async_threads", "between 1 and 1024")
        require(self.log_level in ("debug", "info", "warning", "error", "off"), "log_level", "a known level")

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None, **given: Any) -> Config:
        """Settings of the environment, with ``given`` (those not None) above them. Raises InvalidArgument."""
        env = os.environ if env is None else env
        values: dict[str, Any] = {}
        for f in dataclasses.fields(cls):
            text = env.get(f.metadata["env"])
            if text is not None and text != "":
                values[f.name] = text
        values.update((name, value) for name, value in given.items() if value is not None)
        for f in dataclasses.fields(cls):
            if f.name in values:
                values[f.name] = _convert(f.name, str(f.type), values[f.name], f.metadata["env"])
        return cls(**values)

    def describe(self) -> list[tuple[str, str, Any, str]]:
        """(name, environment variable, value, what it is) of each; the token is not shown."""
        return [
            (f.name, f.metadata["env"], "***" if f.name == "token" and self.token else getattr(self, f.name),
             f.metadata["doc"])
            for f in dataclasses.fields(self)
        ]  # fmt: skip


def _convert(name: str, kind: str, value: Any, env: str) -> Any:
    try:
        if name == "memory":
            return parse_bytes(value)
        if kind == "int":
            return int(value)
        if kind == "float":
            return float(value)
        if kind.startswith("tuple"):
            parts = value.split(",") if isinstance(value, str) else value
            return tuple(str(part).strip() for part in parts)
    except InvalidArgument:
        raise
    except (TypeError, ValueError):
        raise InvalidArgument(f"{name} ({env}) must be a number, not {value!r}") from None
    return str(value)
