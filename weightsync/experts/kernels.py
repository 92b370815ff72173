"""Kernels of `CudaMover`, in Triton, which comes with PyTorch for CUDA. Import this module only on use.

Each rank has memory that all ranks map. `table`, int64[R + 1], has the addresses of all ranks' memory, and
the bytes of a slot. The memory begins with words of 64 bits: the number of exchanges, a mask of the ranks
that did not come, and a signal from each rank. Two slots follow. An exchange uses the slot that the exchange
before did not use, so that one signal suffices: a rank that has come has read all earlier exchanges. Kernels
read the number of exchanges from the device's memory, so that graphs can be replayed.

After a time-out nothing waits, and -1 or NaN arrives.
"""

# ruff: noqa: ANN001, ANN201, ANN202, N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, unused-ignore"

from __future__ import annotations

import triton
import triton.language as tl

HEAD_NBYTES = 512
MOST_RANKS = 32
_HEAD = tl.constexpr(HEAD_NBYTES)
_LANES = tl.constexpr(MOST_RANKS)
_WORD = tl.constexpr(tl.pointer_type(tl.int64))


@triton.jit
def _head(table, rank):
    return tl.load(table + rank).to(_WORD)


@triton.jit
def _slots(table, ranks, num_ranks, exchange, begin, dtype: tl.constexpr):
    """Return pointers into the slots of `ranks`, `begin` bytes from their begin: a multiple of 16."""
    slots = tl.load(table + ranks) + _HEAD + (exchange & 1) * tl.load(table + num_ranks)
    return tl.multiple_of((slots + begin).to(tl.pointer_type(dtype)), 16)


@triton.jit(do_not_specialize=["rank", "num_ranks", "timeout_ns"])
def meet(table, rank, num_ranks, missing, timeout_ns, TIMED: tl.constexpr):
    """Signal to all ranks, and wait for their signals. One program. `missing`: the mask, for the CPU."""
    own, peers = _head(table, rank), tl.arange(0, _LANES)
    is_peer = peers < num_ranks
    exchange = tl.load(own) + 1
    tl.store(own, exchange)
    there = tl.load(table + peers, mask=is_peer, other=0).to(_WORD) + 2 + rank
    none = tl.zeros([_LANES], tl.int64)
    tl.atomic_xchg(there, none + exchange, mask=is_peer, sem="release", scope="sys")
    start = tl.extra.cuda.globaltimer() if TIMED else exchange
    waits, late = tl.load(own + 1) == 0, is_peer
    while waits:
        seen = tl.atomic_add(own + 2 + peers, none, mask=is_peer, sem="acquire", scope="sys")
        late = is_peer & (seen < exchange)
        waits = tl.max(late.to(tl.int32), 0) > 0
        now = tl.extra.cuda.globaltimer() if TIMED else start + timeout_ns
        if waits & (now - start >= timeout_ns):
            mask = tl.sum(tl.where(late, tl.full([_LANES], 1, tl.int64) << peers, 0), 0)
            tl.store(own + 1, mask)
            tl.store(missing, mask)
            waits = False


@triton.jit(do_not_specialize=["rank", "num_ranks"])
def put(table, rank, num_ranks, source, numel, BLOCK: tl.constexpr):
    """Copy `source` to this rank's slot."""
    target = _slots(table, rank, num_ranks, tl.load(_head(table, rank)), 0, source.dtype.element_ty)
    for start in range(tl.program_id(0) * BLOCK, numel, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at, mask=at < numel), mask=at < numel)


@triton.jit(do_not_specialize=["rank", "num_ranks", "num_tokens", "scales_at"])
def put_quantised(
    table,
    rank,
    num_ranks,
    x,
    num_tokens,
    scales_at,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Quantise tokens to this rank's slot, as `quantised` does: values, and scales from `scales_at` bytes."""
    exchange = tl.load(_head(table, rank))
    values = _slots(table, rank, num_ranks, exchange, 0, tl.uint8)
    scales = _slots(table, rank, num_ranks, exchange, scales_at, tl.float32)
    per_token: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    for start in range(tl.program_id(0) * GROUP, num_tokens * per_token, tl.num_programs(0) * GROUP):
        block = start + tl.arange(0, GROUP)
        column = (block % per_token * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
        is_block = block < num_tokens * per_token
        is_value = is_block[:, None] & (column < HIDDEN)
        at = (block // per_token).to(tl.int64)[:, None] * HIDDEN + column
        value = tl.load(x + at, mask=is_value, other=0).to(tl.float32)
        scale = tl.div_rn(tl.maximum(tl.max(tl.abs(value), 1), 1e-4), 448.0)
        coded = tl.div_rn(value, scale[:, None] + tl.zeros_like(value)).to(tl.float8e4nv)
        tl.store(values + at, coded.to(tl.uint8, bitcast=True), mask=is_value)
        tl.store(scales + block, scale, mask=is_block)


@triton.jit(do_not_specialize=["rank", "num_ranks", "num_tokens", "plane", "begin"])
def pull(
    table,
    rank,
    num_ranks,
    rows,
    out,
    num_tokens,
    plane,
    begin,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Copy tokens from all ranks' slots to rows of `out`. A token is read once, and written to each row.

    `rows`, int64[R, T, K]: a token's rows here, -1 for none. `plane`: copy the tokens from ``plane * T`` on.
    `begin`: bytes of a slot before the tokens.
    """
    own = _head(table, rank)
    exchange, has_failed = tl.load(own) - 1, tl.load(own + 1) != 0
    num_pairs = num_ranks * num_tokens
    for start in range(tl.program_id(0) * GROUP, num_pairs, tl.num_programs(0) * GROUP):
        pair = start + tl.arange(0, GROUP)
        is_pair = pair < num_pairs
        pair = tl.minimum(pair, num_pairs - 1)
        first = rows + pair.to(tl.int64) * TOP_K
        last = tl.load(first)
        for k in tl.static_range(1, TOP_K):
            last = tl.maximum(last, tl.load(first + k))
        slot = _slots(table, pair // num_tokens, num_ranks, exchange, begin, out.dtype.element_ty)
        source = slot + (plane * num_tokens + pair % num_tokens).to(tl.int64) * WIDTH
        for at in tl.static_range(0, WIDTH, BLOCK):
            column = at + tl.arange(0, BLOCK)[None, :]
            is_needed = (is_pair & (last >= 0))[:, None] & (column < WIDTH)
            data = tl.load(source[:, None] + column, mask=is_needed)
            data = tl.where(has_failed, tl.full(data.shape, -1, tl.int64).to(data.dtype), data)
            for k in tl.static_range(TOP_K):
                row = tl.load(first + k)[:, None]
                tl.store(out + row * WIDTH + column, data, mask=is_needed & (row >= 0))


@triton.jit
def _zero(out, begin, end, part, num_parts, BLOCK: tl.constexpr):
    for start in range(begin + part * BLOCK, end, num_parts * BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(out + at, tl.zeros([BLOCK], out.dtype.element_ty), mask=at < end)


@triton.jit(do_not_specialize=["num_local", "capacity"])
def clear(out, counts, offsets, num_local, capacity, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Zero the rows without a token: after each expert's rows, and behind the last expert."""
    num_programs, program = tl.num_programs(0), tl.program_id(0)
    # Each expert has programs of its own: one after another, the loads of all experts' counts take longest.
    num_parts = tl.maximum(num_programs // num_local, 1)
    for expert in range(program // num_parts, num_local, num_programs // num_parts):
        begin = tl.load(offsets + expert) + tl.load(counts + expert)
        end = tl.load(offsets + expert + 1)
        _zero(out, begin * WIDTH, end * WIDTH, program % num_parts, num_parts, BLOCK)
    used, all_rows = tl.load(offsets + num_local), tl.full([], capacity, tl.int64)
    _zero(out, used * WIDTH, all_rows * WIDTH, program, num_programs, BLOCK)


@triton.jit(do_not_specialize=["rank", "num_ranks", "num_tokens"])
def put_sums(
    table,
    rank,
    num_ranks,
    rows,
    values,
    weights,
    num_tokens,
    WEIGHTED: tl.constexpr,
    DOUBLE: tl.constexpr,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the rows of each token to this rank's slot, [R, T, W], as `Routing.partial_sums` does."""
    target = _slots(table, rank, num_ranks, tl.load(_head(table, rank)), 0, values.dtype.element_ty)
    dtype: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    width = tl.full([], WIDTH, tl.int64)
    for pair in range(tl.program_id(0), num_ranks * num_tokens, tl.num_programs(0)):
        first = rows + pair * TOP_K
        last = tl.load(first)
        for k in tl.static_range(1, TOP_K):
            last = tl.maximum(last, tl.load(first + k))
        for at in tl.static_range(0, WIDTH, BLOCK):
            column = at + tl.arange(0, BLOCK)
            is_needed = (last >= 0) & (column < WIDTH)
            total = tl.zeros([BLOCK], dtype)
            for k in tl.static_range(TOP_K):
                row = tl.load(first + k)
                term = tl.load(values + row * WIDTH + column, mask=is_needed & (row >= 0), other=0).to(dtype)
                if WEIGHTED:
                    term = tl.where(row >= 0, term * tl.load(weights + pair * TOP_K + k), 0)
                total += term
            tl.store(target + pair * width + column, total.to(values.dtype.element_ty), mask=is_needed)


@triton.jit(do_not_specialize=["rank", "num_ranks", "num_tokens", "max_tokens"])
def add_sums(
    table,
    rank,
    num_ranks,
    here,
    out,
    num_tokens,
    max_tokens,
    RANKS: tl.constexpr,
    DOUBLE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up all ranks' sums of this rank's tokens. `here`: uint8[T, R], 1 for a rank with a sum."""
    own = _head(table, rank)
    exchange, has_failed = tl.load(own) - 1, tl.load(own + 1) != 0
    dtype: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    width = tl.full([], WIDTH, tl.int64)
    for token in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        place = (rank * max_tokens + token) * width
        for at in tl.static_range(0, WIDTH, BLOCK):
            column = at + tl.arange(0, BLOCK)
            total = tl.zeros([BLOCK], dtype)
            for peer in tl.static_range(RANKS):
                is_needed = (tl.load(here + token * RANKS + peer) != 0) & (column < WIDTH)
                source = _slots(table, peer, num_ranks, exchange, 0, out.dtype.element_ty) + place
                total += tl.load(source + column, mask=is_needed, other=0).to(dtype)
            total = tl.where(has_failed, float("nan"), total)
            tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def count(ids, position, counts, numel, BLOCK: tl.constexpr):
    """Number the choices of each expert, and count them. One program for each expert."""
    expert, num = tl.program_id(0), tl.full([], 0, tl.int64)
    for start in range(0, numel, BLOCK):
        at = start + tl.arange(0, BLOCK)
        is_chosen = tl.load(ids + at, mask=at < numel, other=-1) == expert
        tl.store(position + at, num + tl.cumsum(is_chosen.to(tl.int32), 0) - 1, mask=is_chosen)
        num += tl.sum(is_chosen.to(tl.int32), 0)
    tl.store(counts + expert, num)


@triton.jit(do_not_specialize=["num_local", "alignment", "capacity"])
def place(counts, offsets, needed, num_local, alignment, capacity, BLOCK: tl.constexpr):
    """Place the experts of a rank, and leave out rows that do not fit. One program for each rank."""
    rank, expert = tl.program_id(0), tl.arange(0, BLOCK)
    is_expert = expert < num_local
    num = tl.load(counts + rank * num_local + expert, mask=is_expert, other=0)
    padded = (num + alignment - 1) // alignment * alignment
    ends = tl.cumsum(padded, 0)
    first = offsets + rank * (num_local + 1)
    tl.store(first, tl.full([], 0, tl.int64))
    tl.store(first + 1 + expert, tl.minimum(ends, capacity), mask=is_expert)
    fitting = tl.minimum(num, tl.maximum(capacity - (ends - padded), 0))
    tl.store(counts + rank * num_local + expert, fitting, mask=is_expert)
    tl.store(needed + rank, tl.sum(padded, 0))


@triton.jit(do_not_specialize=["num_tokens", "num_local", "num_ranks", "capacity"])
def route(
    ids,
    position,
    offsets,
    row,
    owner,
    here,
    num_tokens,
    num_local,
    num_ranks,
    capacity,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Find the row of each choice, and the ranks that need each token."""
    token = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    k = tl.arange(0, CHOICES)[None, :]
    at, is_choice = token[:, None] * TOP_K + k, (token < num_tokens)[:, None] & (k < TOP_K)
    expert = tl.load(ids + at, mask=is_choice, other=-1)
    is_chosen = (expert >= 0) & (expert < num_local * num_ranks)
    rank = tl.where(is_chosen, expert // num_local, num_ranks)
    # A rank has one more offset than experts.
    begin = tl.load(offsets + expert + rank, mask=is_chosen, other=0)
    found = begin + tl.load(position + at, mask=is_chosen, other=0)
    found = tl.where(is_chosen & (found < capacity), found, -1)
    tl.store(row + at, found, mask=is_choice)
    tl.store(owner + at, rank, mask=is_choice)
    for peer in range(num_ranks):
        is_here = tl.max(((rank == peer) & (found >= 0)).to(tl.int32), 1)
        tl.store(here + token * num_ranks + peer, is_here.to(tl.uint8), mask=token < num_tokens)
