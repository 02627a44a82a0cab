"""Return codes: what each error of torch_mooncake is called here."""

from __future__ import annotations

import logging

from torch_mooncake import errors

logger = logging.getLogger("torch_mooncake.compat")

OK = 0
INTERNAL_ERROR = -1
NO_AVAILABLE_HANDLE = -200
INVALID_PARAMS = -600
OBJECT_NOT_FOUND = -704
OBJECT_ALREADY_EXISTS = -705
OBJECT_HAS_LEASE = -706
TRANSFER_FAIL = -800
RPC_FAIL = -900

# The first class that an error is an instance of decides.
_CODES: tuple[tuple[type[Exception], int], ...] = (
    (errors.KeyNotFound, OBJECT_NOT_FOUND),
    (errors.KeyExists, OBJECT_ALREADY_EXISTS),
    (errors.PoolFull, NO_AVAILABLE_HANDLE),
    (errors.Busy, OBJECT_HAS_LEASE),
    (errors.PoolUnavailable, RPC_FAIL),
    (errors.DeadlineExceeded, TRANSFER_FAIL),
    (errors.PeerLost, TRANSFER_FAIL),
    (errors.Corrupt, TRANSFER_FAIL),
    (errors.IoError, TRANSFER_FAIL),
    (errors.InvalidArgument, INVALID_PARAMS),
    (errors.LayoutMismatch, INVALID_PARAMS),
    (errors.OutOfBounds, INVALID_PARAMS),
)


def code_of(error: Exception, what: str) -> int:
    """The code of an error; what is more than a miss is logged, with what was being done."""
    if not isinstance(error, errors.KeyNotFound):
        logger.warning("%s: %s: %s", what, type(error).__name__, error)
    return next((code for kind, code in _CODES if isinstance(error, kind)), INTERNAL_ERROR)
