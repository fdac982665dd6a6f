"""What a step of data-parallel training costs on many GPUs: a model on paper, checked where we could measure.

    step = compute + slowed + exposed   exposed = max(exchange / b, exchange - backward * (1 - 1 / b))

for b buckets: DDP sends a bucket while the backward pass computes the next, so all but the last may be
hidden. The exchange of B bytes of plain gradients (a ring all-reduce over n nodes of g GPUs, W = n g):

    2 (W - 1) / W * B / rate + latencies        rate: the slower of a GPU's link and a node's network cards

In few bits, b bytes of messages, in two steps (`fewbits.training.ranks.communication`). Within one node or
between single GPUs, an all-to-all and an all-gather of (W - 1) / W * b each. Between nodes of several GPUs,
with ``node_size``: (g - 1) / g * B inside (reduce-scatter), 2 (n - 1) / n * b between the nodes, (g - 1) / g
* b inside (all-gather). Without it the all-to-all alone sends g times b (W - g) / W from every node, more
than bfloat16's ring in all once g > 3 in INT8: `hierarchical=False` shows it.

Quantising, adding and decoding cost memory traffic (`fewbits.kernels.codec.gradient_codec`) at
``memory_rate``. A bucket is coded while another travels, so of codec and network the shorter is hidden but
for one bucket:

    exchange = max(network, codec) + min(network, codec) / b        network = inside + between + latencies

Every bucket pays latencies: 2 (g - 1) inside and 2 log2(n) between, for a ring within and a tree between
nodes; in few bits 2 inside, and 1 + log2(n) between. Rates are goodput: what is left of a line's bits for
payload (0.956 of Ethernet's with frames of 1,500 bytes; where the answers share the line, 0.935).

``slowed``: products beside NCCL's kernels and casts take longer, whatever travels, because they share a GPU's
multiprocessors and its memory: 0.10 of a step without exchange on four H200s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fewbits.errors import BadInput
from fewbits.formats import get_format
from fewbits.kernels.codec.gradient_codec import wire_format, wire_of

PLAIN = {"float32": 4.0, "bfloat16": 2.0}
_MANY = 2**24


@dataclass(frozen=True, kw_only=True)
class Link:
    """One direction of a connection, while the other is as busy.

    Attributes:
        rate: bytes a second.
        latency: seconds from a message's start to its arrival, for an empty one.
    """

    rate: float
    latency: float


# What was measured on four H200s: an all-reduce of 1 GiB in 4.6 ms, so 2 * 3 / 4 GiB in that time.
NVLINK = Link(rate=1.5 * 2**30 / 4.6e-3, latency=5e-6)
ETHERNET = 0.956  # payload's share of a line's bits with frames of 1,500 bytes
H200_MEMORY = 4.28e12  # what a copy reaches
SLOWDOWN = 0.1  # on four H200s, 4 x 2048 tokens each of a 1.2B model: 138.2 ms, with an all-reduce 152.5 ms


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal nodes of equal GPUs.

    Attributes:
        gpus: all of them.
        node_size: GPUs of a node.
        inside: what a GPU sends to the others of its node.
        between: what a node sends to others, all its network cards together.
        memory_rate: bytes a second of a GPU's memory that the codec reaches.
        codec_seconds_per_value: the codec's time instead, where it was measured; None: from memory_rate.
        slowdown: by how much more than its compute a step takes while anything is exchanged beside it.
    """

    gpus: int
    node_size: int = 8
    inside: Link = NVLINK
    between: Link
    memory_rate: float = H200_MEMORY
    codec_seconds_per_value: float | None = None
    slowdown: float = SLOWDOWN

    def __post_init__(self) -> None:
        """Refuse what is no cluster."""
        if self.gpus < 1 or self.node_size < 1 or (self.gpus > self.node_size and self.gpus % self.node_size):
            raise BadInput(
                f"{self.gpus} GPUs are no nodes of {self.node_size} each; give a multiple of the node size."
            )
        rates = (self.inside.rate, self.between.rate, self.memory_rate)
        if min(rates) <= 0 or min(self.inside.latency, self.between.latency) < 0:
            raise BadInput("rates must be above 0 and latencies not below; check the cluster's links.")

    @property
    def in_node(self) -> int:
        """GPUs of a node that are used."""
        return min(self.node_size, self.gpus)

    @property
    def nodes(self) -> int:
        """Nodes that are used."""
        return self.gpus // self.in_node


@dataclass(frozen=True, kw_only=True)
class Work:
    """A step without any exchange.

    Attributes:
        values: trained values, all of whose gradients are exchanged.
        compute: seconds of forward, backward and optimizer.
        backward_share: of them the backward pass's.
        gradient_bytes: bytes of a gradient value in memory, 4 or 2.
        buckets: into which the gradients are cut; None: of 25 MiB, DDP's own.
    """

    values: float
    compute: float
    backward_share: float = 2 / 3
    gradient_bytes: int = 4
    buckets: int | None = None

    @property
    def num_buckets(self) -> int:
        """At least one."""
        return self.buckets or max(math.ceil(self.values * self.gradient_bytes / (25 * 2**20)), 1)


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a step costs, in seconds.

    Attributes:
        format: what the gradients travel in.
        gpus: how many.
        compute: of the step without any exchange.
        inside: on the links within a node.
        between: on the network between nodes.
        latency: of all messages.
        codec: of quantising, adding and decoding.
        slowed: what computing takes longer beside it.
        exchange: all of it, were nothing computed beside it.
        exposed: what of the exchange the backward pass does not hide.
        bytes_between: bytes that leave a node.
    """

    format: str
    gpus: int
    compute: float
    inside: float
    between: float
    latency: float
    codec: float
    slowed: float
    exchange: float
    exposed: float
    bytes_between: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.compute + self.slowed + self.exposed

    @property
    def efficiency(self) -> float:
        """The share of the time that one GPU alone takes: speed over linear."""
        return self.compute / self.seconds


def step_time(work: Work, cluster: Cluster, format: str, *, hierarchical: bool = True) -> Step:
    """The time of one step.

    Args:
        work: what a GPU computes, and what it has to exchange.
        cluster: the machines.
        format: "float32", "bfloat16", or a format in which gradients travel in few bits ("int8").
        hierarchical: in few bits, nodes of several GPUs add their gradients first.

    Returns:
        Its parts.
    """
    buckets, codec = work.num_buckets, 0.0
    if format in PLAIN:
        inside, between, sent = _plain(work, cluster, format)
        hops = 2 * (cluster.in_node - 1), 2 * math.log2(cluster.nodes)
    else:
        inside, between, sent = _few_bits(work, cluster, format, hierarchical=hierarchical)
        hops = 2 * (cluster.in_node > 1), (cluster.nodes > 1) * (1 + math.log2(cluster.nodes))
        codec = _codec(work, cluster, format, cluster.in_node if hierarchical and cluster.nodes > 1 else 1)
    latency = buckets * (hops[0] * cluster.inside.latency + hops[1] * cluster.between.latency)
    network = inside + between + latency
    exchange = max(network, codec) + min(network, codec) / buckets
    slowed = work.compute * cluster.slowdown if cluster.gpus > 1 else 0.0
    hidden = (work.compute + slowed) * work.backward_share * (1 - 1 / buckets)
    exposed = max(exchange / buckets, exchange - hidden)
    return Step(
        format=format, gpus=cluster.gpus, compute=work.compute, inside=inside, between=between,
        latency=latency, codec=codec, slowed=slowed, exchange=exchange, exposed=exposed, bytes_between=sent,
    )  # fmt: skip


def _plain(work: Work, cluster: Cluster, format: str) -> tuple[float, float, float]:
    """Seconds inside and between nodes, bytes that leave a node: a ring, as fast as its slowest link."""
    n, g, W = cluster.nodes, cluster.in_node, cluster.gpus
    ring = 2 * (W - 1) / W * work.values * PLAIN[format]
    within = ring / cluster.inside.rate if g > 1 else 0.0
    across = ring / cluster.between.rate if n > 1 else 0.0
    slower = across >= within
    return (0.0 if slower else within), (across if slower else 0.0), (ring if n > 1 else 0.0)


def _few_bits(work: Work, cluster: Cluster, format: str, *, hierarchical: bool) -> tuple[float, float, float]:
    """Seconds inside and between nodes, and bytes that leave a node."""
    n, g, W = cluster.nodes, cluster.in_node, cluster.gpus
    message = work.values * bytes_per_value(format)
    if n == 1:
        return 2 * (W - 1) / W * message / cluster.inside.rate, 0.0, 0.0
    if g == 1 or not hierarchical:
        sent = g * (W - g) / W * message + (W - 1) / W * message
        inside = 2 * (g - 1) / W * message / cluster.inside.rate
        return inside, sent / cluster.between.rate, sent
    sent = 2 * (n - 1) / n * message
    inside = (g - 1) / g * (work.values * work.gradient_bytes + message) / cluster.inside.rate
    return inside, sent / cluster.between.rate, sent


def _codec(work: Work, cluster: Cluster, format: str, parts: int) -> float:
    """Seconds: quantise (4 + gradient + m) bytes a value, add and quantise m + (4 + m) / ranks, decode."""
    if cluster.codec_seconds_per_value is not None:
        return work.values * cluster.codec_seconds_per_value
    m, grad = bytes_per_value(format), work.gradient_bytes
    ranks = cluster.gpus // parts
    first = (grad + 4 + m) + m + (4 + m) / ranks  # what is kept is bfloat16, read and written
    return work.values * (first / parts + m + grad) / cluster.memory_rate


def bytes_per_value(format: str) -> float:
    """Bytes on the wire for one gradient value of a large tensor, scales included."""
    if format in PLAIN:
        return PLAIN[format]
    value = wire_format(get_format(format))
    return wire_of(value, _MANY, 1).row_bytes / _MANY


def plan(
    work: Work,
    cluster: Cluster,
    gpus: Sequence[int],
    formats: Sequence[str] = ("float32", "bfloat16", "int8", "int4"),
) -> list[Step]:
    """`step_time` for every number of GPUs and every format, in this order."""
    return [step_time(work, replace(cluster, gpus=count), name) for count in gpus for name in formats]
