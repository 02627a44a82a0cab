"""Any tensor-parallel degree to any other, any order of the bytes in a page, over every wire, pushed and pulled."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sides import ORDERS, DecodeSide, PrefillSide, cache, model_pages, rank_heads, settled

import torch_mooncake as tm
from torch_mooncake.kv import GroupTensors, PagedKV, PlaneTensor

LAYERS, SIZE, DIM = 3, 4, 8
SOURCE_PAGES, SINK_PAGES = [7, 2, 5], 3


class World:
    """Prefill ranks and decode ranks of one model, each with an engine of its own."""

    def __init__(
        self, heads, prefill_tp, decode_tp, orders=("PKNHD", "PKNHD"), transports=("local", "shm", "tcp"),
        layers=LAYERS, size=SIZE, dim=DIM, dtype=torch.float32, **options,
    ):  # fmt: skip
        self.model = model_pages(layers, 9, size, heads, dim, dtype)
        self.heads, self.layers = heads, layers
        self.prefill, self.decode = [], []
        for rank in range(prefill_tp):
            part = self.model[:, :, :, :, rank_heads(heads, rank, prefill_tp)]
            kv = cache(part.shape, orders[0], dtype, together=rank % 2 == 1)
            for layer in range(layers):
                kv.layers[layer].copy_(part[layer])
            self.prefill.append(PrefillSide(kv, transports, tp_rank=rank, tp_size=prefill_tp, **options))
        for rank in range(decode_tp):
            local = max(1, heads // decode_tp)
            kv = cache((layers, 6, 2, size, local, dim), orders[1], dtype, together=rank % 2 == 0)
            self.decode.append(DecodeSide(kv, transports, tp_rank=rank, tp_size=decode_tp, **options))

    def right(self, rank: int, layer: int, pages: list[int]) -> bool:
        wanted = self.model[layer, SOURCE_PAGES][:, :, :, rank_heads(self.heads, rank, len(self.decode))]
        return torch.equal(self.decode[rank].kv.layers[layer][pages], wanted)

    def push(self, wire="auto"):
        """Prefill ranks layer by layer, decode ranks checking each at the instant they hear of it."""
        sessions = [side.receiver.open(SINK_PAGES, prompt_pages=SINK_PAGES, wire=wire) for side in self.decode]
        pushes = [side.sender.open([session.ticket() for session in sessions]) for side in self.prefill]
        results = self._run(sessions, pushes)
        return sessions, pushes, results

    def pull(self, wire="auto"):
        pushes = [side.sender.offer(wire=wire) for side in self.prefill]
        tickets = [push.ticket() for push in pushes]
        for layer in range(self.layers - 1):  # before anybody has come
            for push in pushes:
                push.push_layer(layer, SOURCE_PAGES)
        options = {"prompt_pages": SINK_PAGES, "wire": wire}
        sessions = [side.receiver.pull(tickets, SINK_PAGES, **options) for side in self.decode]
        results = self._run(sessions, pushes, first=self.layers - 1)
        return sessions, pushes, results

    def _run(self, sessions, pushes, first=0):
        for layer in range(first, self.layers):
            for push in pushes:
                push.push_layer(layer, SOURCE_PAGES[1:], start=1)
                push.push_layer(layer, SOURCE_PAGES[:1], start=0)
            for rank, session in enumerate(sessions):
                session.wait_layer(layer)
                assert self.right(rank, layer, session.pages)
        results = []

        def finish(rank: int) -> None:
            results.append(pushes[rank].finish({"rank": rank, str(rank): 1}))

        threads = [threading.Thread(target=finish, args=(rank,)) for rank in range(len(pushes))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == len(pushes)
        return results

    def check_all(self, sessions) -> None:
        for rank, session in enumerate(sessions):
            session.wait()
            assert session.state == "done"
            for layer in range(self.layers):
                assert self.right(rank, layer, session.pages)
            others = [page for page in range(6) if page not in session.pages]
            assert all(kv[others].eq(-1).all() for kv in self.decode[rank].kv.layers)
            self.decode[rank].allocator.free(session.pages)
        assert settled(*self.decode, *self.prefill)

    def close(self) -> None:
        for side in [*self.prefill, *self.decode]:
            side.close()


@pytest.fixture
def world():
    made = []

    def make(*args, **options) -> World:
        made.append(World(*args, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("wire", ["direct", "packed"])
@pytest.mark.parametrize(
    ("heads", "prefill_tp", "decode_tp"), [(4, 1, 2), (4, 2, 1), (4, 4, 2), (3, 3, 1), (2, 4, 1), (2, 1, 4), (2, 4, 2)]
)
def test_pushed_between_degrees(world, heads, prefill_tp, decode_tp, wire):
    each = world(heads, prefill_tp, decode_tp, ("PKNHD", "PKHND"))
    sessions, pushes, results = each.push(wire)
    each.check_all(sessions)
    for push in pushes:
        assert {plan.wire for plan in push.plans} <= {wire, "none"}
    page = each.model[0, 0].nbytes // heads * max(heads, decode_tp)
    moved = sum(result.nbytes for result in results)
    assert moved == len(SOURCE_PAGES) * LAYERS * page  # each head to each rank that holds it, once


@pytest.mark.parametrize("wire", ["direct", "packed"])
@pytest.mark.parametrize(("heads", "prefill_tp", "decode_tp"), [(4, 1, 1), (4, 2, 1), (2, 1, 2), (2, 4, 2)])
def test_pulled_between_degrees(world, heads, prefill_tp, decode_tp, wire):
    each = world(heads, prefill_tp, decode_tp, ("PKHND", "KPNHD"))
    sessions, _, _ = each.pull(wire)
    each.check_all(sessions)


@pytest.mark.parametrize("transport", ["local", "shm", "tcp"])
@pytest.mark.parametrize("mode", ["push", "pull"])
def test_over_each_transport(world, transport, mode):
    each = world(2, 1, 1, ("PHKND", "PKNHD"), transports=(transport,))
    for wire in ("direct", "packed", "auto"):
        sessions, pushes, _ = getattr(each, mode)(wire)
        each.check_all(sessions)
        for side in each.decode:
            for layer in side.kv.layers:
                layer.fill_(-1)
        assert wire in (pushes[0].plan.wire, "auto")


def test_what_is_sent_and_why_can_be_read(world):
    each = world(4, 2, 1, ("PKNHD", "PKHND"), transports=("tcp",))
    sessions, pushes, results = each.push()
    assert [result.wire for result in results] == ["packed", "packed"]
    plan = pushes[1].plan
    assert (plan.run_nbytes, plan.runs_per_page) == (DIM * 4, 2 * SIZE * 2)
    assert str(plan) in sessions[0].explain()
    assert "prefill rank 1 of 2 to decode rank 0 of 1 over " in str(plan)
    assert "packed (runs are shorter than" in pushes[1].explain()
    assert sessions[0].wires == {0: "packed", 1: "packed"}
    assert sessions[0].wait() == {"rank": 0, "0": 1, "1": 1}  # of several ranks: together, the lowest one's counts
    each.check_all(sessions)


def test_float8_only_if_both_say_so(world):
    each = world(2, 1, 1, dtype=torch.bfloat16)
    session = each.decode[0].receiver.open(SINK_PAGES)
    with pytest.raises(tm.InvalidArgument, match="loses precision"):
        each.prefill[0].sender.open(session.ticket(), wire="packed_fp8")
    with pytest.raises(tm.InvalidArgument, match="loses precision"):
        session.wait()
    session = each.decode[0].receiver.open(SINK_PAGES, wire="packed_fp8")
    with each.prefill[0].sender.open(session.ticket()) as push:
        for layer in range(LAYERS):
            push.push_layer(layer, SOURCE_PAGES)
        result = push.finish()
    session.wait()
    assert (result.wire, session.wires) == ("packed_fp8", {0: "packed_fp8"})
    elements = len(SOURCE_PAGES) * each.model[0, 0].numel()
    assert result.nbytes < LAYERS * elements * 1.5  # a byte an element, and scales
    for layer in range(LAYERS):
        got, wanted = each.decode[0].kv.layers[layer][session.pages].float(), each.model[layer, SOURCE_PAGES].float()
        amax = wanted.abs().amax(dim=(2, 4), keepdim=True)
        assert ((got - wanted).abs() <= torch.maximum(wanted.abs() / 16, amax / 448 / 1024) * 1.01 + 1e-3 * amax).all()
        assert not torch.equal(got, wanted)
    each.decode[0].allocator.free(session.pages)
    assert settled(*each.decode, *each.prefill)


def test_staging_memory_smaller_than_a_layer(world):
    """Packed chunks wait for room, on both sides, and for nobody's help."""
    each = world(2, 1, 2, ("PKNHD", "PKHND"), staging_nbytes=2048)
    for mode in (each.push, each.pull):
        sessions, _, _ = mode("packed")
        each.check_all(sessions)
        for side in each.decode:
            for layer in side.kv.layers:
                layer.fill_(-1)


def mixed(pages: int, fill: float) -> PagedKV:
    """Full attention, a sliding window and states: three groups with page ids of their own."""
    full = [tm.empty((pages, 2, SIZE, 2, DIM), dtype=torch.float32).fill_(fill) for _ in range(2)]
    window = tm.empty((2, pages + 3, SIZE, 2, DIM), dtype=torch.float32).fill_(fill)
    states = [tm.empty((4, 33), dtype=torch.float32).fill_(fill)]
    return PagedKV.from_groups(
        [
            GroupTensors({0: [PlaneTensor(full[0])], 2: [PlaneTensor(full[1])]}, name="full"),
            GroupTensors(
                {1: [PlaneTensor(window[0], "PNHD", "k"), PlaneTensor(window[1], "PNHD", "v")]}, name="window", window=8
            ),
            GroupTensors({3: [PlaneTensor(states[0], "PD", "state")]}, name="mamba", kind="state", page_size=0),
        ]
    )


@pytest.mark.parametrize("wire", ["direct", "packed"])
def test_groups_with_pages_of_their_own(wire):
    prefill, decode = PrefillSide(mixed(6, 0)), DecodeSide(mixed(5, -1))
    numbers = torch.arange(10000, dtype=torch.float32)
    for group in prefill.kv.layout.groups:
        for _, planes in group.layers:
            for plane in planes:
                memory = prefill.kv.storages[plane.storage].view(torch.float32)
                memory.copy_(numbers[: memory.numel()])
    session = decode.receiver.open([3, 2, 1], prompt_pages=[2, 2, 1], wire=wire)
    pushed = {0: [4, 1], 2: [4, 1], 1: [8, 0], 3: [2]}
    with prefill.sender.open(session.ticket()) as push:
        for layer in (0, 1, 2):
            push.push_layer(layer, pushed[layer])
            session.wait_layer(layer)
        with pytest.raises(tm.InvalidArgument, match="group mamba were not pushed in layers 3"):
            push.finish()
    with pytest.raises(tm.InvalidArgument):
        session.wait()
    session = decode.receiver.open([3, 2, 1], prompt_pages=[2, 2, 1], wire=wire)
    with prefill.sender.open(session.ticket()) as push:
        for layer, pages in pushed.items():
            push.push_layer(layer, pages)
        push.finish()
    session.wait()
    for group, count in enumerate([2, 2, 1]):
        pages = session.group_pages[group][:count]
        for place, (layer, _) in enumerate(decode.kv.layout.groups[group].layers):
            ours, theirs = raw_pages(decode.kv, group, place, pages), raw_pages(prefill.kv, group, place, pushed[layer])
            assert torch.equal(ours, theirs)
            assert not theirs.eq(-1).any()
    for allocator, pages in zip(decode.allocators, session.group_pages, strict=True):
        allocator.free(pages)
    assert settled(prefill, decode)
    prefill.close()
    decode.close()


def raw_pages(kv: PagedKV, group: int, place: int, pages: list[int]) -> torch.Tensor:
    layer = kv.layout.groups[group].layer_ids[place]
    packed = kv.layout.segments(pages, [layer], group)
    pieces = zip(packed.storage.tolist(), packed.offset.tolist(), packed.nbytes.tolist(), strict=True)
    by_page = [kv.storages[s].view(torch.uint8)[o : o + n] for s, o, n in pieces]
    whole = torch.cat(by_page).view(torch.float32)
    order = torch.tensor(sorted(range(len(pages)), key=lambda i: pages[i]))
    parts = len(kv.layout.groups[group].layers[place][1])
    out = whole.view(parts, len(pages), -1) if parts > 1 else whole.view(1, len(pages), -1)
    back = torch.empty_like(out)
    back[:, order] = out
    return back


@settings(max_examples=15, deadline=None)
@given(
    layers=st.sampled_from([1, 2, 5, 128]),
    heads=st.sampled_from([1, 3, 8, 64]),
    dim=st.sampled_from([1, 5, 33, 64]),
    size=st.sampled_from([1, 3, 16]),
    orders=st.tuples(st.sampled_from(sorted(ORDERS)), st.sampled_from(sorted(ORDERS))),
    tp=st.tuples(st.sampled_from([1, 2]), st.sampled_from([1, 2])),
    transport=st.sampled_from(["shm", "tcp"]),
    wire=st.sampled_from(["auto", "direct", "packed"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]),
)
def test_any_shape(layers, heads, dim, size, orders, tp, transport, wire, dtype):
    if layers == 128:
        heads, size, dim = min(heads, 3), min(size, 3), min(dim, 33)
    if heads % 2 and heads != 1:
        tp = (1, 1)
    each = World(heads, *tp, orders, (transport,), layers=layers, size=size, dim=dim, dtype=dtype)
    try:
        sessions, _, _ = each.push(wire)
        for rank, session in enumerate(sessions):
            session.wait()
            for layer in range(layers):
                assert each.right(rank, layer, session.pages)
    finally:
        each.close()
