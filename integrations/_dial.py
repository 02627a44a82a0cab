"""A peer that has told where it listens, and which engine it is."""

from __future__ import annotations

from collections.abc import Iterable

import torch_mooncake as tm


def dial(engine: tm.Engine, addresses: Iterable[str], engine_id: str, timeout_s: float) -> tm.Peer:
    """The engine of that id (hex), at the first of its addresses at which it answers. Errors: those of the last
    attempt; PeerLost where another engine answers, or none of them does."""
    failure: tm.Error = tm.PeerLost("it listens nowhere", peer=engine_id)
    for address in addresses:
        try:
            peer = engine.connect(address, timeout=timeout_s)
        except (tm.PeerLost, tm.Unsupported) as error:
            failure = error
            continue
        if peer.id.hex() == engine_id:
            return peer
        peer.close()
        failure = tm.PeerLost("another engine answers there", peer=address)
    raise failure
