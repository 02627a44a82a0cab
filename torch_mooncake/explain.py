"""What ``engine.explain(peer)`` returns: a dict for programs, a text for people."""

from __future__ import annotations

from typing import Any


class Explanation(dict[str, Any]):
    """How bytes travel to and from a peer. ``str()`` of it is for people.

    ``peer``, ``alive``, ``same_host``, ``not_same_host_because``; ``read`` and ``write``: the transport that carries
    ordinary memory in that direction ("" if none does); ``paths``: best first, each with ``transport``, ``option``
    (what allows it), ``serves`` (which memory), ``no_read`` and ``no_write`` (why it cannot be used; "" if it can),
    ``sizes`` (``direction``, ``up_to_nbytes`` or None, ``how``), ``facts`` and ``lanes`` (as in ``stats()``).
    """

    def __str__(self) -> str:
        where = "on this host" if self["same_host"] else f"not on this host ({self['not_same_host_because']})"
        lines = [f"{self['peer']}: {where}{'' if self['alive'] else ', lost'}"]
        lines.append(f"  ordinary memory: read by {self['read'] or 'nothing'}, written by {self['write'] or 'nothing'}")
        for path in self["paths"]:
            lines += ["  " + line for line in _path(path)]
        return "\n".join(lines)

    __repr__ = __str__


def _path(path: dict[str, Any]) -> list[str]:
    lines = [f"{path['transport']}: {path['serves']}" if path["serves"] else f"{path['transport']}:"]
    if path["no_read"] and path["no_read"] == path["no_write"]:
        return [f"{path['transport']}: not used, {path['no_read']}"]
    for direction in ("read", "write"):
        if why := path[f"no_{direction}"]:
            lines.append(f"  {direction}: not used, {why}")
            continue
        for rule in path["sizes"]:
            if rule["direction"] == direction:
                upper = rule["up_to_nbytes"]
                size = "any size" if upper is None else f"up to {upper} bytes"
                lines.append(f"  {direction}, {size}: {rule['how']}")
    lines += [f"  {name}: {_plain(value)}" for name, value in path["facts"].items()]
    for lane in path["lanes"]:
        facts = "".join(f", {name} {_plain(value)}" for name, value in lane["facts"].items())
        rail = f", rail {lane['rail']}" if lane["rail"] else ""
        state = "" if lane["alive"] else ", down"
        lines.append(
            f"  lane {lane['lane']}{rail}{state}: {lane['bytes_sent']} bytes sent, {lane['bytes_received']} received, "
            f"{lane['queued_bytes']} queued{facts}"
        )
    return lines


def _plain(value: Any) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
