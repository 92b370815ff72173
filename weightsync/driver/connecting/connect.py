"""Connects a fleet: one plan for all members, every path between them tried."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from dataclasses import dataclass

from weightsync.config import SyncConfig
from weightsync.driver.connecting.conversions import ranks_as_taken, require_casts, with_casts
from weightsync.driver.connecting.layouts import Layouts, are_alike, ask_layouts
from weightsync.driver.connecting.linking import Exports, Served, link_all, link_engine
from weightsync.driver.connecting.routing import Router
from weightsync.driver.connecting.trial import Trial, run_trial
from weightsync.driver.connecting.ways import Joining
from weightsync.driver.fleet import EngineMember, Fleet
from weightsync.driver.gather import GRACE_S, gather_named
from weightsync.errors import DeadlineError, PlanError, TransportError, WeightSyncError
from weightsync.plan import MAPPED, Layout, Members, Plan, make_plan, same_dtype_tensors
from weightsync.plan.direct.direct_plan import make_direct_plan
from weightsync.plan.layout.coverage import check_live
from weightsync.plan.layout.layout import join_tables
from weightsync.plan.layout.layout_table import LayoutTable
from weightsync.protocol.device_memory import DeviceMemory, LiveMemory, RankMemory
from weightsync.protocol.messages import Attached, FeedTicket, Prepared
from weightsync.protocol.peers import HolderPeer, SharedPlan
from weightsync.protocol.timing import PhaseClock

CONNECT_PHASES = ("layouts", "trial", "plan", "prepare", "join", "attach", "warm_up")


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Layout of an engine's flat snapshots: `flat_layout` digest and number of rank 0's part.

    Engines with the same `FlatLayout` can be filled from each other's snapshots.
    """

    layout: str
    first: int


@dataclass(frozen=True, slots=True)
class Connection:
    """Everything that updates use of a connected fleet.

    Attributes:
        plan: held by every member.
        shared: `plan` in the form that is sent to members, also to members that are adopted later.
        content: the plan's `Plan.content`.
        in_place: trainers' memory is read in place, so it may change after an update.
        checkpoint: the weights come from a checkpoint, not from a trainer.
        flat_layouts: the layout of flat snapshots, by engine, if holders have mapped the engine's memory.
        router: the engines that read the trainers' memory.
        layouts: each engine's layouts by rank; an adopted engine must have the layouts of one of these
            engines, or other places of experts.
        joined: the same, with the ranks of each engine joined.
        stated: the trainers' layout, as `TrainersLayout.stated`.
        converts: how each engine quantises tensors, without casts.
        seconds: duration of each phase.
    """

    plan: Plan
    shared: SharedPlan
    content: str
    in_place: bool
    checkpoint: bool
    flat_layouts: dict[str, FlatLayout]
    router: Router
    layouts: dict[str, Sequence[LayoutTable]]
    joined: dict[str, Layout]
    stated: Layout
    converts: dict[str, str]
    seconds: Mapping[str, float]

    @property
    def moving(self) -> dict[str, str]:
        """The arrangement of experts that each engine was planned for, of engines that move experts."""
        places = {name: ranks[0].arrangement for name, ranks in self.layouts.items()}
        return {name: each.key for name, each in places.items() if each}


async def connect(
    fleet: Fleet,
    config: SyncConfig,
    epoch: int,
    demoted: Mapping[str, str] | None = None,
    clock: PhaseClock | None = None,
) -> Connection:
    """Connect a fleet: layouts, plan, memory, communicators, comparison of plan digests, warm-up.

    A trial shows first which engines can read directly. If all can, the plan has no buckets and no
    communicators for broadcasts. Engines in `demoted` cannot read directly, see `Router`. `clock` gets the
    `CONNECT_PHASES`.

    Raises:
        PlanError, ConfigError: the two sides do not fit, a member computed another plan, or a draft model is
            neither trained nor frozen on purpose.
        DeadlineError: names the members that did not answer within ``config.connect_timeout_s``.
        StateError: no engine is alive.
        TransportError: a mapping failed; or an engine could read directly in the trial but not now, and the
            plan has no buckets.
    """
    clock = clock or PhaseClock()
    with clock.phase("layouts"):
        layouts = await ask_layouts(fleet, config)
        if fleet.drafts.by_engine or any(rank.draft for ranks in layouts.engines.values() for rank in ranks):
            fleet.drafts.check(layouts.engines, config)
        layouts = layouts.casting()
    for member in fleet.engines.values():
        member.attached = False  # from now on holders leave the earlier plan, also if this fails
    with clock.phase("trial"):
        if in_place := all(rank.device not in ("", MAPPED) for rank in layouts.trainers):
            trial = await run_trial(fleet, config, layouts.trainers, layouts.engines, demoted or {})
        else:
            trial = Trial({}, {})
    num_slots = 0 if in_place and not _needs_buckets(layouts, trial) else config.num_slots
    return await _open(fleet, config, layouts, epoch, num_slots, demoted or {}, trial, clock)


def _needs_buckets(layouts: Layouts, trial: Trial) -> bool:
    """Return True if an engine takes broadcasts, of all tensors or of tensors of another dtype."""
    if any(trial.obstacles.values()):
        return True
    # One engine is enough: if engines hold different dtypes, an engine that casts may not read directly.
    return bool(same_dtype_tensors(layouts.source.stated, *next(iter(layouts.joined.items())))[1])


async def _open(
    fleet: Fleet,
    config: SyncConfig,
    layouts: Layouts,
    epoch: int,
    num_slots: int,
    demoted: Mapping[str, str],
    trial: Trial,
    clock: PhaseClock,
) -> Connection:
    timeout_s = config.connect_timeout_s
    with clock.phase("plan"):
        plan = _plan(fleet, layouts, config, epoch, num_slots)
    with clock.phase("prepare"):
        shared_plan = SharedPlan(fleet.share(plan))
        sources = {holder: layouts.trainers[rank].device for rank, (_, holder) in enumerate(fleet.trainers)}
        peers = enumerate(fleet.holders)
        calls = {f"holder {i}": each.prepare(shared_plan, i, sources.get(i, "")) for i, each in peers}
        prepared = list((await gather_named(calls, "prepare", timeout_s)).require().values())
    with clock.phase("attach"):  # communicators open at the same time: all of these mostly wait
        holders = fleet.named_holders()
        attaching = asyncio.ensure_future(_attach(fleet, plan, layouts, shared_plan, prepared, config))
        parts: dict[str, Awaitable[object]] = {"serve_snapshots": _serve_snapshots(holders, config)}
        parts |= {"join": _join(holders, prepared, config, clock), "attach": attaching}
        # Each of the three calls has its own deadlines. A lost process ends the wait for all of them.
        (await gather_named(parts, "attach", math.inf, together=True)).require()
        exports, served = attaching.result()
    with clock.phase("warm_up"):
        warm_ups = {name: holder.warm_up(timeout_s) for name, holder in holders.items()}
        (await gather_named(warm_ups, "warm-up", timeout_s + GRACE_S, together=True)).require()
        router = Router(fleet, config, plan, layouts.source, exports, demoted)
        for name, memory in served.items():
            its = Joining(layouts.joined[name], memory, layouts.engines[name][0].converts)
            router.join(name, its, trial.failures.get(name, ""))
            await router.plan_reads(name)
            if not router.suffices:
                raise TransportError(
                    f"engine {name} could read the trainers' memory directly in a trial, and now cannot: "
                    f"{router.routes[name]}; connect() again, or set sync.mode to broadcast"
                )
        await router.meet()
    for member in fleet.live().values():
        member.attached = True
    content, in_place = plan.content(), any(exports)
    flat_layouts = _flat_layouts(content, layouts.engines, served)
    checkpoint = any(rank.device == MAPPED for rank in layouts.trainers)
    return Connection(
        plan,
        shared_plan,
        content,
        in_place,
        checkpoint,
        flat_layouts,
        router,
        dict(layouts.engines),
        dict(layouts.joined),
        layouts.source.stated,
        dict(layouts.quantised),
        clock.seconds,
    )


def _flat_layouts(
    content: str, layouts: Mapping[str, Sequence[LayoutTable]], served: Mapping[str, Served]
) -> dict[str, FlatLayout]:
    flat_layouts: dict[str, FlatLayout] = {}
    first = 0
    for name, ranks in sorted(layouts.items()):
        if all(served[name]):
            kinds = _kinds(served[name])
            alike = (
                flat
                for other, flat in flat_layouts.items()
                if are_alike(ranks, layouts[other]) and _kinds(served[other]) == kinds
            )
            twin = next(alike, None)
            flat_layouts[name] = twin or FlatLayout(flat_layout(content, ranks, kinds), first)
            first += 0 if twin else len(ranks)
    return flat_layouts


def _exported(layouts: Sequence[LayoutTable], reports: Sequence[Attached]) -> Served:
    """Return the exports of all ranks, which have these `layouts` and `reports`."""
    pairs = zip(layouts, reports, strict=True)
    return [RankMemory(layout.own(), each.export) if each.export else each.live for layout, each in pairs]


def _kinds(ranks: Served) -> Sequence[str]:
    return [each.kind for each in ranks if isinstance(each, LiveMemory)]


def _plan(fleet: Fleet, layouts: Layouts, config: SyncConfig, epoch: int, num_slots: int) -> Plan:
    members = Members(
        num_holders=len(fleet.holders),
        trainers=tuple(holder for _, holder in fleet.trainers),
        engines=tuple((name, fleet.engines[name].holders) for name in layouts.engines),
    )
    if not num_slots:
        return make_direct_plan(
            layouts.source, layouts.joined, members, bucket_bytes=config.bucket_bytes, epoch=epoch
        )
    return make_plan(
        layouts.source.whole,
        layouts.joined,
        members,
        bucket_bytes=config.bucket_bytes,
        max_staging_bytes=config.max_staging_bytes,
        slots=num_slots,
        epoch=epoch,
    )


async def _serve_snapshots(holders: Mapping[str, HolderPeer], config: SyncConfig) -> None:
    """Have holders serve snapshots now, so that a wrong setting fails at connect."""
    if config.keep_versions > 1:
        how = config.refill, config.rdma_device
        calls = {process: holder.serve_snapshots(*how) for process, holder in holders.items()}
        (await gather_named(calls, "prepare", config.connect_timeout_s)).require()


async def _join(
    holders: Mapping[str, HolderPeer], prepared: Sequence[Prepared], config: SyncConfig, clock: PhaseClock
) -> None:
    offers = {group: offer for answer in prepared for group, offer in answer.offers.items()}
    timeout_s = config.connect_timeout_s
    joins = {name: holder.join(offers, timeout_s) for name, holder in holders.items()}
    with clock.phase("join"):
        (await gather_named(joins, "join", timeout_s + GRACE_S, together=True)).require()


async def _attach(
    fleet: Fleet,
    plan: Plan,
    layouts: Layouts,
    shared: SharedPlan,
    prepared: Sequence[Prepared],
    config: SyncConfig,
) -> tuple[Exports, Mapping[str, Served]]:
    """Attach trainers and engine ranks. Returns the trainers' exports and the engines' reports."""
    timeout_s = config.connect_timeout_s
    names: dict[bytes, bytes] = {}

    # Before the others answer: a thousand ranks have equal names.
    async def attach(call: Coroutine[object, object, Attached]) -> Attached:
        answer = await call
        return answer.known_by(names) if answer.export else answer

    async def attach_ranks(call: Coroutine[object, object, Sequence[Attached]]) -> Sequence[Attached]:
        return [each.known_by(names) if each.export else each for each in await call]

    calls = {
        f"trainer {rank}": attach(trainer.attach(shared, rank, prepared[holder].send_buffer))
        for rank, (trainer, holder) in enumerate(fleet.trainers)
    }
    engines = {}
    for name in layouts.engines:  # a DEAD engine, too: its error ends the wait of its holders
        member = fleet.engines[name]
        tickets = [ticket for holder in member.holders if (ticket := prepared[holder].ticket)]
        call = member.peer.attach(shared, tickets, timeout_s, config.prefix_cache)
        engines[f"engine {name}"] = attach_ranks(call)
    trainers, answers = await asyncio.gather(
        gather_named(calls, "attach", timeout_s + GRACE_S),
        _meet(fleet, engines, fleet.named_holders(), timeout_s),
    )
    attached = trainers.require()
    digests = {f"holder {i}": [answer.plan_digest] for i, answer in enumerate(prepared)}
    digests |= {name: [answer.plan_digest] for name, answer in attached.items()}
    digests |= {name: [each.plan_digest for each in ranks] for name, ranks in answers.items()}
    _compare(plan.digest(), digests)
    sources = _exported(layouts.trainers, [*attached.values()])
    exports = [each if isinstance(each, RankMemory) else None for each in sources]
    found = {name.removeprefix("engine "): reports for name, reports in answers.items()}
    if layouts.differ:
        require_casts(plan.tensors, layouts.joined, found)
    served = {name: _exported(layouts.engines[name], reports) for name, reports in found.items()}
    if any(map(any, (exports, *served.values()))):
        await link_all(fleet, layouts, exports, served, timeout_s)
    return exports, served


async def _meet(
    fleet: Fleet,
    engines: Mapping[str, Coroutine[object, object, Sequence[Attached]]],
    holders: Mapping[str, HolderPeer],
    timeout_s: float,
    ahead: asyncio.Future[Mapping[str, DeviceMemory]] | None = None,
) -> Mapping[str, Sequence[Attached]]:
    """Connect engines with their holders, which meanwhile map the memory that engines exported `ahead`.

    An error of a holder is raised before the deadline of an engine.
    """
    drops: list[asyncio.Future[object]] = []

    async def attach(name: str, call: Coroutine[object, object, Sequence[Attached]]) -> Sequence[Attached]:
        try:
            return await call
        except WeightSyncError:
            # The engine's holders would wait for a hello until their deadline. A silent holder does not delay
            # the error: the engine has already answered.
            own = fleet.engines[name.removeprefix("engine ")].holders
            calls = {f"holder {i}": fleet.holders[i].drop_engine() for i in own}
            drops.append(asyncio.ensure_future(gather_named(calls, "drop", GRACE_S)))
            raise

    async def accept(name: str, holder: HolderPeer) -> Sequence[Attached]:
        await holder.accept(timeout_s, (await ahead).get(name) if ahead else None)
        return ()

    calls: dict[str, Awaitable[Sequence[Attached]]] = {n: attach(n, call) for n, call in engines.items()}
    calls |= {name: accept(name, holder) for name, holder in holders.items()}
    met = await gather_named(calls, "attach", timeout_s + GRACE_S, together=True)
    await asyncio.gather(*drops)
    answers = met.require()
    return {name: answers[name] for name in engines}


async def adopt(fleet: Fleet, connection: Connection, name: str, config: SyncConfig) -> None:
    """Connect one engine with its holders, without trainers and other engines.

    A refill needs no direct reads, so the router plans these reads later, see `Router.plan_reads`.

    Raises PlanError if the plan has no engine of this layout, or if the engine needs buckets and the plan has
    none. Then the whole fleet has to connect again. Also raises the other errors of `connect`, such as
    ConfigError if a draft is neither trained nor frozen, or a frozen draft has changed.
    """
    member, plan, timeout_s = fleet.engines[name], connection.plan, config.timeout_s
    named = f"engine {name}"
    layout = gather_named({named: member.peer.layout(config.components)}, "layout", timeout_s)
    asking = asyncio.ensure_future(layout)
    ahead = asyncio.ensure_future(_export(connection, name, member, config))
    try:
        holders = {f"holder {i}": fleet.holders[i] for i in member.holders}
        taking = _take_tickets(connection, name, holders, config)
        asked, tickets = await asyncio.gather(asking, taking, return_exceptions=True)  # both are to end
        if isinstance(asked, BaseException):
            raise asked
        names = {meta.name for meta in plan.tensors}
        layouts = ranks_as_taken(asked.require()[named], names)
        joined = _joined(connection, name, layouts)
        fleet.drafts.check({name: layouts}, config)
        if isinstance(tickets, BaseException):
            raise tickets
        engines = {named: member.peer.attach(connection.shared, tickets, timeout_s, config.prefix_cache)}
        attached = (await _meet(fleet, engines, holders, timeout_s, ahead))[named]
        _compare(plan.digest(connection.content), {named: [each.plan_digest for each in attached]})
        served = _exported(layouts, attached)
        await link_engine(fleet, member.holders, layouts, served, timeout_s)
        _note_flat(connection, name, layouts, served)
        require_casts(plan.tensors, {name: joined}, {name: attached})
        converts = with_casts(layouts, joined, plan.tensors)[0].converts
        connection.converts[name] = layouts[0].converts
        connection.router.join(name, Joining(joined, served, converts))
        if not connection.router.suffices:
            raise PlanError(
                named,
                f"it takes broadcasts, for which the plan has no buckets: {connection.router.routes[name]}",
            )
        member.attached = True
    finally:  # neither may still run when all connect again
        await asyncio.gather(asking, ahead, return_exceptions=True)


def _joined(connection: Connection, name: str, layouts: Sequence[LayoutTable]) -> Layout:
    """Return the joined layout of a joining engine, and record it if the engine moves experts.

    Raises PlanError if the plan has no engine of this layout, places of experts aside.
    """
    twins = [other for other, known in connection.layouts.items() if are_alike(layouts, known)]
    if twins and not layouts[0].arrangement:
        return connection.joined[twins[0]]
    made = connection.joined[twins[0]] if twins else join_tables(layouts)
    same = (
        made.tied == each.tied and {*made.tensors} == {*each.tensors} for each in connection.joined.values()
    )
    if not layouts[0].arrangement or not any(same):
        raise PlanError(f"engine {name}", "its layout is new to the plan")
    check_live(name, made)
    before = connection.joined.get(name)
    connection.layouts[name], connection.joined[name] = layouts, made
    if before and before not in connection.joined.values():
        connection.router.forget(before)
    return made


def _note_flat(connection: Connection, name: str, layouts: Sequence[LayoutTable], served: Served) -> None:
    """Note the layout of a joining engine's flat snapshots, if it is known, or if experts moved."""
    known = {flat.layout: flat for flat in connection.flat_layouts.values()}
    before = connection.flat_layouts.pop(name, None)
    if not all(served):
        return
    layout = flat_layout(connection.content, layouts, _kinds(served))
    if flat := known.get(layout):
        connection.flat_layouts[name] = flat
    elif before and before not in connection.flat_layouts.values():
        connection.flat_layouts[name] = FlatLayout(layout, before.first)  # as many bytes as before


async def _take_tickets(
    connection: Connection, name: str, holders: Mapping[str, HolderPeer], config: SyncConfig
) -> Sequence[FeedTicket]:
    """Have holders prepare for the ranks of a joining engine."""
    await _serve_snapshots(holders, config)
    calls = {process: holder.adopt(connection.shared, name) for process, holder in holders.items()}
    return list((await gather_named(calls, "adopt", config.timeout_s)).require().values())


async def _export(
    connection: Connection, name: str, member: EngineMember, config: SyncConfig
) -> Mapping[str, DeviceMemory]:
    """Return the coming exports of a joining engine, by holder, if holders map such memory.

    Raises DeadlineError if the engine does not answer: holders wait for this answer, so they must not be
    named too. The engine's attach reports any other fault.
    """
    if not connection.flat_layouts:
        return {}
    named = f"engine {name}"
    asked = await gather_named({named: member.peer.export(config.components)}, "export", config.timeout_s)
    if isinstance(error := asked.failures.get(named), DeadlineError):
        raise error
    pairs = zip(member.holders, asked.answers.get(named, ()), strict=False)
    return {f"holder {i}": memory for i, memory in pairs if memory}


def _compare(wanted: str, digests: Mapping[str, list[str]]) -> None:
    for name, found in digests.items():
        for digest in found:
            if digest != wanted:
                raise PlanError(name, f"it computed plan {digest[:12]}, the controller {wanted[:12]}")


def flat_layout(content: str, ranks: Sequence[LayoutTable], kinds: Sequence[str] = ()) -> str:
    """Return the SHA-256 (hex) of an engine's flat snapshot layout.

    `content` is the plan's. `kinds` has the kind of each rank's live parameters, if snapshots are copies of
    these.
    """
    state = hashlib.sha256("".join((content, *kinds)).encode())
    for rank in ranks:
        for part in rank.memory_content():
            state.update(part)
    return state.hexdigest()
