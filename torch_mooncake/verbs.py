"""The verbs of ``tm``: the methods of ``Pool`` on the default pool, and their ``await`` forms."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Concatenate, ParamSpec, TypeVar

from torch_mooncake import context
from torch_mooncake.pool import Pool

P = ParamSpec("P")
R = TypeVar("R")


def _verb(method: Callable[Concatenate[Pool, P], R]) -> Callable[P, R]:
    @functools.wraps(method)
    def verb(*args: P.args, **kwargs: P.kwargs) -> R:
        return method(context.default(), *args, **kwargs)

    return verb


def _async(method: Callable[Concatenate[Pool, P], R]) -> Callable[P, Awaitable[R]]:
    @functools.wraps(method)
    async def verb(*args: P.args, **kwargs: P.kwargs) -> R:
        from torch_mooncake import aio

        return await aio.in_thread(lambda: method(context.default(), *args, **kwargs))

    return verb


put = _verb(Pool.put)
get = _verb(Pool.get)
exists = _verb(Pool.exists)
delete = _verb(Pool.delete)
keys = _verb(Pool.keys)
wait = _verb(Pool.wait)
stat = _verb(Pool.stat)
put_many = _verb(Pool.put_many)
get_many = _verb(Pool.get_many)
info = _verb(Pool.info)
put_state_dict = _verb(Pool.put_state_dict)
get_state_dict = _verb(Pool.get_state_dict)
import_safetensors = _verb(Pool.import_safetensors)
export_safetensors = _verb(Pool.export_safetensors)

aput = _async(Pool.put)
aget = _async(Pool.get)
aexists = _async(Pool.exists)
adelete = _async(Pool.delete)
akeys = _async(Pool.keys)
await_key = _async(Pool.wait)
astat = _async(Pool.stat)
aput_many = _async(Pool.put_many)
aget_many = _async(Pool.get_many)
ainfo = _async(Pool.info)
aput_state_dict = _async(Pool.put_state_dict)
aget_state_dict = _async(Pool.get_state_dict)
aimport_safetensors = _async(Pool.import_safetensors)
aexport_safetensors = _async(Pool.export_safetensors)
