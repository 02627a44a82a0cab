"""The one tree of errors. Each class stands for one code of the native core and says whether a second attempt may help.

Missing and failed are different things: ``KeyNotFound`` means the key is not there, ``PoolUnavailable`` that nobody
could say. Every error carries ``code``, ``retryable``, ``peer`` (whom it concerned, or "") and ``bytes_done``.
"""

from __future__ import annotations

from typing import Any


class Error(Exception):
    """Base of everything torch_mooncake raises on its own."""

    code: str = "INTERNAL"
    retryable: bool = False
    failed_pages: tuple[int, ...] = ()  # of KV sessions: ids of the pages that did not arrive whole

    def __init__(
        self, message: str = "", *, retryable: bool | None = None, peer: str = "", bytes_done: int = 0
    ) -> None:
        super().__init__(message)
        self.message = message
        self.retryable = type(self).retryable if retryable is None else retryable
        self.peer = peer
        self.bytes_done = bytes_done

    def __str__(self) -> str:  # KeyError would show the repr
        return f"{self.message} (peer {self.peer})" if self.peer else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.retryable, self.peer, self.bytes_done)


def _rebuild(cls: type[Error], message: str, retryable: bool, peer: str, bytes_done: int) -> Error:
    return cls(message, retryable=retryable, peer=peer, bytes_done=bytes_done)


class InvalidArgument(Error, ValueError):
    """The caller's mistake: a size, a name, a type."""

    code = "INVALID_ARGUMENT"


class OutOfBounds(Error, IndexError):
    """A slice leaves its region; nothing was written."""

    code = "OUT_OF_BOUNDS"


class KeyNotFound(Error, KeyError):
    """The key is not in the pool (or not with the version asked for)."""

    code = "KEY_NOT_FOUND"


class KeyExists(Error):
    """``if_exists="error"`` and the key is there."""

    code = "KEY_EXISTS"


class PoolFull(Error):
    """No room within the deadline; the message has the sizes."""

    code = "POOL_FULL"
    retryable = True


class PoolUnavailable(Error):
    """No node answers, or the leader is lost."""

    code = "POOL_UNAVAILABLE"
    retryable = True


class PeerLost(Error, ConnectionError):
    """The other process died, or its connection broke."""

    code = "PEER_LOST"
    retryable = True


class DeadlineExceeded(Error, TimeoutError):
    """Time ran out; the operation is over all the same."""

    code = "DEADLINE_EXCEEDED"
    retryable = True


class Cancelled(Error):
    """Ended by ``cancel()``."""

    code = "CANCELLED"


class AuthError(Error, PermissionError):
    """Wrong token, or a user who is not allowed in."""

    code = "AUTH"


class VersionMismatch(Error):
    """The two sides speak different protocol versions; the message has both."""

    code = "VERSION_MISMATCH"


class Corrupt(Error):
    """Bytes do not match their checksum or their description."""

    code = "CORRUPT"


class LayoutMismatch(Error, ValueError):
    """The two sides describe their tensors differently."""

    code = "LAYOUT_MISMATCH"


class Busy(Error):
    """Memory is still within somebody's reach: it is kept in quarantine."""

    code = "BUSY"
    retryable = True


class Closed(Error):
    """Used after ``close()``."""

    code = "CLOSED"


class Forked(Error):
    """Made before a fork and used in the child."""

    code = "FORKED"


class Unsupported(Error, NotImplementedError):
    """An unknown transport or an absent capability."""

    code = "UNSUPPORTED"


class IoError(Error, OSError):
    """A system call failed; the message has its text."""

    code = "IO"


class InternalError(Error, RuntimeError):
    """A bug of torch_mooncake: please report."""

    code = "INTERNAL"


_BY_CODE: dict[str, type[Error]] = {
    cls.code: cls
    for cls in (
        InvalidArgument,
        OutOfBounds,
        KeyNotFound,
        KeyExists,
        PoolFull,
        PoolUnavailable,
        PeerLost,
        DeadlineExceeded,
        Cancelled,
        AuthError,
        VersionMismatch,
        Corrupt,
        LayoutMismatch,
        Busy,
        Closed,
        Forked,
        Unsupported,
        IoError,
        InternalError,
    )
}

__all__ = ["Error", *(cls.__name__ for cls in _BY_CODE.values())]


def from_code(code: str, message: str, retryable: bool, peer: str, bytes_done: int) -> Error:
    """The exception for a native status (called by ``_core``)."""
    return _rebuild(_BY_CODE.get(code, InternalError), message, retryable, peer, bytes_done)
