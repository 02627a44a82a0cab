"""Tensors that refer to another process's slot on the same host, which does not overwrite it while they do.

A version is viewed through regions that its owners offer for it alone. Each lease is a use of such a region: the owner
takes the region back before it overwrites the slot, and cannot while there is a lease, which ends with the last tensor
that refers to it, or with its process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from torch_mooncake.errors import Error, KeyNotFound, PeerLost, Unsupported
from torch_mooncake.tensors import DTYPES
from torch_mooncake.weights.atoms import compare
from torch_mooncake.weights.board import COMPLETE, VERSION, VIEW
from torch_mooncake.weights.bring import NobodyHasIt
from torch_mooncake.weights.members import Head, Links, Member, Room
from torch_mooncake.weights.ranges import Addresses
from torch_mooncake.weights.shards import Manifest, listed
from torch_mooncake.weights.upstream import Superseded

_OPEN_S = 5.0


class Viewer:
    """For one thread. ``member``: this process; its manifest is a packed one."""

    def __init__(self, room: Room, links: Links, member: Member) -> None:
        self._room, self._links, self._manifest, self._part = room, links, member.manifest, member.part
        self._found: tuple[list[str], dict[str, tuple[str, int]]] | None = None  # for these members: see _places

    def view(self, head: Head) -> dict[str, torch.Tensor]:
        """The local tensors, by name. Superseded: it is being overwritten; NobodyHasIt: of this host, yet; Unsupported:
        some tensors do not lie as they are here, or it is in a model's own tensors; LayoutMismatch; PeerLost."""
        owners = self._owners(head)
        places = self._places(head, owners)
        slots = {uid: self._lease(owners[uid], head.version) for uid in {uid for uid, _ in places.values()}}
        tensors = {}
        for local in self._manifest.locals:
            uid, offset = places[local.name]
            nbytes = math.prod(local.shape) * DTYPES[local.dtype]
            dtype = getattr(torch, local.dtype)
            tensors[local.name] = slots[uid][offset : offset + nbytes].view(dtype).view(local.shape)
        return tensors

    def _owners(self, head: Head) -> dict[str, Member]:
        """Members of this host that have slots with all of the version, by uid: trainers first."""
        found, in_place = {}, ""
        for uid in (*head.sources, *head.targets):
            member = self._room.member(uid)
            if member is None or not member.relays or self._links.alive(member) is not True:
                continue
            if not self._links.open(member).peer.same_host or not self._links.has(member, head.version):
                continue
            if member.has_slots:
                found[uid] = member
            else:
                in_place = member.record.name
        if in_place and not found:
            raise Unsupported(f'flip="view" is for what lies in slots; {in_place} has the version in its own tensors')
        if not found:
            raise NobodyHasIt(f"nobody of this host has version {head.version} of the weights to be viewed")
        return found

    def _places(self, head: Head, owners: Mapping[str, Member]) -> dict[str, tuple[str, int]]:
        """Of each local tensor: who has it as it is here, and where in a slot."""
        if self._found is not None and self._found[0] == list(owners):
            return self._found[1]
        if head.subset:
            raise Unsupported('flip="view" is for all of the weights; a subset is published')
        sources = [member for uid in head.sources if (member := self._room.member(uid)) is not None]
        compare([member.manifest for member in sources], [self._manifest], partial=self._part)
        sides = {uid: Addresses(member.manifest, member.offsets) for uid, member in owners.items()}
        names = _ties([member.manifest for member in owners.values()])
        found: dict[str, tuple[str, int]] = {}
        lacking = []
        for i, local in enumerate(self._manifest.locals):
            place = None
            for uid, side in sides.items():
                offset = self._same(i, side, names)
                if offset is not None:
                    place = uid, offset
                    break
            if place is None:
                lacking.append(f"{local.name}: does not lie anywhere on this host as it is here")
            else:
                found[local.name] = place
        if lacking:
            raise Unsupported(listed('flip="view" cannot be had', lacking))
        self._found = list(owners), found
        return found

    def _same(self, local: int, side: Addresses, names: Mapping[str, Sequence[str]]) -> int | None:
        """The offset in the side's slot at which the local tensor lies as it is here."""
        manifest, found, covered = self._manifest, set(), 0
        for row in np.flatnonzero(manifest.local == local).tolist():
            whole = manifest.wholes[int(manifest.whole[row])]
            rows = side.rows(names.get(whole.name, [whole.name]), manifest.start[row], manifest.size[row])
            if not rows:
                return None
            itemsize = DTYPES[whole.dtype]
            offset, strides = side.place(rows[0], manifest.start[row], itemsize)
            mine = manifest.stride[row] * itemsize
            wide = manifest.size[row] > 1
            if (np.array(strides[-manifest.ndim :])[wide] != mine[wide]).any():
                return None
            found.add(offset - int(manifest.offset[row]) * itemsize)
            covered += math.prod(manifest.size[row].tolist())
        if covered != math.prod(manifest.locals[local].shape) or len(found) > 1:
            return None
        return found.pop() if found else 0

    def _lease(self, member: Member, version: int) -> torch.Tensor:
        """The bytes of the member's slot."""
        slot = self._slot_with(member, version)
        try:
            self._links.slot(member, slot)  # stays open, so that the slot stays mapped between two leases
            remote = self._links.open(member).peer.open(self._links.area(member, slot, VIEW), _OPEN_S)
        except KeyNotFound:
            raise Superseded from None
        except Error:
            self._links.drop(member.uid)
            raise
        memory: Any = remote.lease()
        if memory is None or self._slot_with(member, version) != slot:
            raise Superseded
        return torch.frombuffer(memory, dtype=torch.uint8)

    def _slot_with(self, member: Member, version: int) -> int:
        (header,) = self._links.headers([member])
        if header is None:
            raise PeerLost(f"{member.record.name} does not answer")
        slots = np.flatnonzero((header[:, VERSION] == version) & (header[:, COMPLETE] == 1))
        if not len(slots):
            raise Superseded
        return int(slots[0])


def _ties(manifests: Sequence[Manifest]) -> dict[str, list[str]]:
    """Each name, and those that are tied to it or it to them."""
    groups: dict[str, set[str]] = {}
    for manifest in manifests:
        for name, root in manifest.aliases.items():
            group = groups.get(root, {root}) | groups.get(name, {name})
            for each in group:
                groups[each] = group
    return {name: [name, *sorted(group - {name})] for name, group in groups.items()}
