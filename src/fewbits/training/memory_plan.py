"""Which layers keep what for the backward pass, so that a training step fits a memory budget and waits least.

Every layer has four things that it may give up, each with the bytes that it frees and the seconds that it
costs to have it again (`fewbits.nn.keep.Keep`). The planner gives them up in the order of bytes freed per
second, one layer at a time and the first layers first, until the predicted peak fits; then it takes back what
the last one freed in excess. The peak is that of the backward pass walking from the last layer to the first:
what a layer makes again is there only while it is at work, so the last layer never needs to give up anything.

Predicted bytes come from shapes alone; the first step's measured peak corrects them (`Planner.corrected`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from fewbits.errors import BadInput
from fewbits.models.families import SPECS
from fewbits.nn.keep import KEEP_ALL, Keep
from fewbits.recipes import Recipe, predict_memory
from fewbits.recipes.memory import Memory, head_copies, linear_shapes

GIB = 2**30
# One chunk of logits, as fewbits.kernels.linear_cross_entropy cuts them, and its form with 8-bit products.
_LOGITS_BYTES, _LOGITS8_BYTES = 512 << 20, 256 << 20
_STEP_DOWN = 0.85  # what the next smaller plan may use of the one that did not fit
# What host traffic costs although it runs beside the products, of its own time: on an H200 at the 8B shape
# less than could be measured.
_HIDDEN_SHARE = 0.02
# Values that transformers' own Llama layer keeps for each token beside the linears' outputs, in widths of the
# residual and of the MLP; fitted to the measured peak of HF + PEFT at the 8B shape (62.4 GiB, 8,192 tokens).
_PLAIN_RESIDUALS, _PLAIN_INNERS = 8, 3


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The rates that seconds are predicted with: what large products and copies reach, not the data sheet."""

    flops: float
    bandwidth: float  # bytes a second of the device's memory
    host_bandwidth: float  # bytes a second to or from pinned host memory


_MACHINES = {
    (8, 0): Machine(flops=240e12, bandwidth=1.4e12, host_bandwidth=22e9),
    (8, 6): Machine(flops=65e12, bandwidth=0.8e12, host_bandwidth=22e9),
    (8, 9): Machine(flops=150e12, bandwidth=0.8e12, host_bandwidth=22e9),
    (9, 0): Machine(flops=600e12, bandwidth=3.6e12, host_bandwidth=45e9),
    (10, 0): Machine(flops=1400e12, bandwidth=6e12, host_bandwidth=45e9),
    (12, 0): Machine(flops=180e12, bandwidth=1.4e12, host_bandwidth=45e9),
}
_PLAIN_MACHINE = Machine(flops=1e11, bandwidth=2e10, host_bandwidth=1e10)


def machine_of(capability: tuple[int, int] | None) -> Machine:
    """The rates of a GPU by its compute capability, of the nearest older one that is known; None: a CPU's."""
    known = [c for c in _MACHINES if capability is not None and c <= capability]
    return _MACHINES[max(known)] if known else _PLAIN_MACHINE


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Bytes that one decoder layer's items take and seconds that making them again takes.

    Attributes:
        always: bytes that stay whatever is chosen: statistics of the norms, the adapters' inner products.
        inputs, attention, mlp, normed: bytes of the items of `Keep`.
        attention_s, mlp_s, normed_s, offload_s: seconds of giving each one up.
        working: bytes of the backward pass through the layer while it is at work.
        plain: bytes that transformers' own layer keeps without recomputation.
        forward_s: the layer's forward pass.
    """

    always: int
    inputs: int
    attention: int
    mlp: int
    normed: int
    attention_s: float
    mlp_s: float
    normed_s: float
    offload_s: float
    working: int
    plain: int
    forward_s: float

    def kept(self, keep: Keep) -> int:
        """Bytes that stay on the device from the forward to the backward pass."""
        chosen = (
            (self.inputs, not keep.offload),
            (self.attention, keep.attention),
            (self.mlp, keep.mlp),
            (self.normed, keep.normed),
        )
        return self.always + sum(size for size, stays in chosen if stays)

    def remade(self, keep: Keep) -> int:
        """Bytes that are there only while the layer's backward pass is at work."""
        half = max(0 if keep.attention else self.attention, 0 if keep.mlp else self.mlp)
        return half + (0 if keep.normed else self.normed // 2) + (self.inputs if keep.offload else 0)

    def seconds(self, keep: Keep) -> float:
        """What giving up costs in one step."""
        costs = (
            (self.attention_s, not keep.attention),
            (self.mlp_s, not keep.mlp),
            (self.normed_s, not keep.normed),
            (self.offload_s, keep.offload),
        )
        return sum(cost for cost, pays in costs if pays)


def layer_cost(
    config: Mapping[str, Any],
    recipe: Recipe,
    machine: Machine,
    *,
    num_tokens: int,
    sequence_length: int,
    dtype_bytes: int = 2,
) -> LayerCost:
    """The cost of one layer of a decoder of the Llama family.

    Args:
        config: the mapping in config.json.
        recipe: tells whether weights are decoded for each product, and the adapters' rank.
        machine: the rates.
        num_tokens: tokens of a batch, padding included.
        sequence_length: tokens that attend to each other; that of the longest sequence.
        dtype_bytes: bytes of a value in activations.
    """
    T, e, H = num_tokens, dtype_bytes, int(config["hidden_size"])
    heads, inner = int(config["num_attention_heads"]), int(config["intermediate_size"])
    shapes = linear_shapes(config)
    q = next(shape[1] for name, shape in shapes.items() if name.endswith("o_proj"))
    qkv = sum(n for name, (n, _) in shapes.items() if name.split(".")[-1] in _QKV)
    norms = _norms_of(config)
    turned = qkv - (qkv - q) // 2 if "self_attn.q_norm" in norms else 0  # normed q and k beside the product
    added = 2 * T * H * e if "post_feedforward_layernorm" in norms else 0  # what the second norms read
    rank = 0 if recipe.lora is None else recipe.lora.r
    is_packed = recipe.linear.weight is not None

    def product(outputs: int) -> float:
        decode = outputs * H * (e + 0.6) / machine.bandwidth if is_packed else 0.0
        return 2 * T * outputs * H / machine.flops + decode

    norm_s = 2 * T * H * e / machine.bandwidth
    attention_s = 2 * T * min(sequence_length, T) * q / (0.6 * machine.flops)  # causal: half of 4 T S q
    qkv_s, gate_up_s = product(qkv), product(2 * inner)
    forward_s = qkv_s + product(q) + gate_up_s + product(inner) + attention_s
    travel_s = 2 * T * H * e / machine.host_bandwidth  # one way; the other way hides behind the backward pass
    decoded = max(2 * inner * H, qkv * H) * e if is_packed else 0
    turns = recipe.lora is None and not is_packed and recipe.linear.weight_operand is not None
    values = sum(n * k for n, k in shapes.values()) if turns else 0  # kept beside the norms' outputs
    return LayerCost(
        always=2 * T * 4 + 7 * rank * T * e + added,
        inputs=2 * T * H * e,
        attention=T * (qkv + q + turned) * e + T * heads * 4,
        mlp=T * 2 * inner * e,
        normed=2 * T * H * e + values,
        attention_s=qkv_s + attention_s + norm_s,
        mlp_s=gate_up_s + norm_s,
        normed_s=2 * norm_s + 2 * values / machine.bandwidth,
        offload_s=2 * travel_s * _HIDDEN_SHARE + max(0.0, travel_s - forward_s),
        working=max(4 * inner, 2 * qkv + q) * T * e + 3 * T * H * e + decoded,
        plain=T * e * (_PLAIN_RESIDUALS * H + 2 * qkv + _PLAIN_INNERS * inner + q),
        forward_s=forward_s,
    )


def _norms_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    spec = SPECS.get(str(config.get("model_type")))
    return () if spec is None else spec.norms


_QKV = ("q_proj", "k_proj", "v_proj", "qkv_proj")


def head_bytes(
    config: Mapping[str, Any],
    num_tokens: int,
    *,
    dtype_bytes: int = 2,
    fused: bool = True,
    recipe: Recipe | None = None,
) -> int:
    """Working bytes of head and loss: one chunk of logits, or with the model's own loss all of them.

    With 8-bit products also their gradient and the rows; copies of a weight that trains are made each time.
    Where it trains, dW is summed in float32, and a chunk may take as many bytes.
    """
    hidden, vocabulary = int(config["hidden_size"]), int(config["vocab_size"])
    states = 3 * num_tokens * hidden * dtype_bytes
    logits = num_tokens * vocabulary * dtype_bytes
    if not fused:  # transformers keeps the logits, widens them to float32 and takes the gradient of that
        return states + logits + logits // dtype_bytes * 8
    is_plain = recipe is None or recipe.head.is_plain
    sum_bytes = 0 if recipe is None or recipe.lora is not None else 4 * hidden * vocabulary
    chunk = min(max(_LOGITS_BYTES if is_plain else _LOGITS8_BYTES, sum_bytes), logits)
    if recipe is None or is_plain:
        return states + chunk + sum_bytes
    copies = 0 if recipe.lora is not None else head_copies(recipe) * hidden * vocabulary
    gradient = chunk // dtype_bytes if recipe.head.gradient else 0
    return states + chunk + sum_bytes + num_tokens * hidden + copies + gradient


def static_of(model: nn.Module, *, optimizer_bytes: int = 8) -> Memory:
    """Bytes of a loaded model: its weights, and gradients and optimizer states of what trains.

    Of a sharded one, what this rank holds, and what is gathered at a time. A frozen head's 8-bit copies
    count, made or not, kept or made anew; `head_bytes` has those of one that trains.
    """
    from fewbits.models.fused_loss import float8_head_of  # it defines kernels, which takes time

    trained = [_local(p) for p in model.parameters() if p.requires_grad]
    size = sum(p.numel() for p in trained)
    lora = sum(p.nbytes for p in trained) if hasattr(model, "peft_config") else 0
    tensors = {t.data_ptr(): t.nbytes for t in map(_local, (*model.parameters(), *model.buffers()))}
    gathered = gathered_bytes(model)
    head = float8_head_of(model)
    copies = 0 if head is None or head.head.weight.requires_grad else head.nbytes
    return Memory(
        weights=sum(tensors.values()) - lora + gathered + copies,
        lora=lora,
        gradients=sum(p.nbytes for p in trained),
        optimizer=size * optimizer_bytes,
        kv_cache=0,
    )


def gathered_bytes(model: nn.Module) -> int:
    """Of parameters that FSDP2 gathers: two layers, and as many on their way; embedding and head; or all."""
    from fewbits.training.fsdp import stays_gathered

    if not any(hasattr(p, "to_local") for p in model.parameters()):
        return 0
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    ends = (model.get_input_embeddings(), model.get_output_embeddings())  # type: ignore[operator]
    tables = {id(p): int(p.nbytes) for module in ends if module is not None for p in module.parameters()}
    whole = sum(p.nbytes for p in model.parameters())
    layers = (whole - sum(tables.values())) // int(config.num_hidden_layers)
    return (whole + 2 * layers) if stays_gathered(model) else 4 * layers + sum(tables.values())


def _local(tensor: Tensor) -> Tensor:
    """A sharded tensor's part on this rank."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.detach()


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Bytes at the peak of a step, by purpose."""

    static: Memory
    kept: tuple[int, ...]  # of each layer
    working: int  # what is there at the peak beside what layers keep

    @property
    def dynamic(self) -> int:
        """What is there only during a step."""
        return sum(self.kept) + self.working

    @property
    def total(self) -> int:
        """The sum."""
        return self.static.total + self.dynamic


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A choice for every layer, and what is expected of it.

    Attributes:
        keeps: one a layer; empty for a model whose layers are not fused.
        predicted: bytes by purpose.
        seconds: predicted cost of recomputation in one step.
        budget_bytes: what was asked for.
        checkpointing: for a model that is not fused: transformers recomputes every layer as a whole.
    """

    keeps: tuple[Keep, ...]
    predicted: Prediction
    seconds: float
    budget_bytes: int
    checkpointing: bool = False

    @property
    def fits(self) -> bool:
        """Whether the prediction is within the budget."""
        return self.predicted.total <= self.budget_bytes

    @property
    def offloads(self) -> bool:
        """Whether any layer's inputs go to the host."""
        return any(keep.offload for keep in self.keeps)

    def __str__(self) -> str:
        """One line for the log and the receipt."""
        if self.keeps:
            counts = Counter(map(str, self.keeps))
            what = "; ".join(f"{n} of {len(self.keeps)} layers keep {name}" for name, n in counts.items())
        elif self.checkpointing:
            what = "layers are recomputed as a whole by transformers, for they are not fused"
        else:
            what = "transformers' layers keep everything"
        size = f"{self.predicted.total / GIB:.2f} GiB predicted of {self.budget_bytes / GIB:.2f} GiB"
        return f"{what}; {size}; recomputation {self.seconds * 1e3:.1f} ms a step"


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Finds plans for one model on one machine at one batch size.

    Attributes:
        static: weights, adapters, gradients, optimizer.
        layer: the cost of a layer; all layers of these families have the same.
        num_layers: how many.
        head: working bytes of head and loss.
        factor: measured over predicted bytes of a step, from `corrected`.
        can_offload: whether inputs may go to the host.
        is_fused: False: only whole-layer checkpointing by transformers can be chosen.
    """

    static: Memory
    layer: LayerCost
    num_layers: int
    head: int
    factor: float = 1.0
    can_offload: bool = True
    is_fused: bool = True

    def plan(self, budget_bytes: int) -> Plan:
        """The plan that fits and costs the fewest seconds; the smallest one if none fits (see ``fits``)."""
        if not self.is_fused:
            plan = self._plain(budget_bytes, checkpointing=False)
            return plan if plan.fits else self._plain(budget_bytes, checkpointing=True)
        found = [self._greedy(budget_bytes, offload=False)]
        if self.can_offload:
            found.append(self._greedy(budget_bytes, offload=True))
        return min(found, key=lambda p: (0, p.seconds) if p.fits else (1, float(p.predicted.total)))

    def _greedy(self, budget_bytes: int, *, offload: bool) -> Plan:
        keeps = [KEEP_ALL] * self.num_layers
        given: list[tuple[float, str, int]] = []
        for cost, item in self._order:
            for i in range(self.num_layers):
                if (item == "offload" and not offload) or self._total(keeps) <= budget_bytes:
                    break
                keeps[i] = _without(keeps[i], item)
                given.append((cost, item, i))
        for _, item, i in sorted(given, key=lambda g: (-g[0], -g[2])):  # take back what frees nothing needed
            tried = list(keeps)
            tried[i] = _with(keeps[i], item)
            if self._total(tried) <= max(budget_bytes, self._total(keeps)):
                keeps = tried
        return self.price(keeps, budget_bytes)

    def smaller(self, plan: Plan) -> Plan | None:
        """The next plan that needs clearly less than ``plan``; None if there is none."""
        static, dynamic = self.static.total, plan.predicted.dynamic
        found = self.plan(static + int(dynamic * _STEP_DOWN))
        if found.predicted.dynamic >= 0.98 * dynamic:
            return None
        return replace(found, budget_bytes=plan.budget_bytes)

    def price(self, keeps: Sequence[Keep], budget_bytes: int = 0) -> Plan:
        """What is expected of a given choice."""
        kept, working = self._bytes(keeps)
        seconds = sum(self.layer.seconds(keep) for keep in keeps)
        predicted = Prediction(static=self.static, kept=kept, working=working)
        return Plan(keeps=tuple(keeps), predicted=predicted, seconds=seconds, budget_bytes=budget_bytes)

    def price_of(self, plan: Plan) -> Plan:
        """What this planner expects of another one's plan."""
        if plan.keeps:
            return self.price(plan.keeps, plan.budget_bytes)
        return self._plain(plan.budget_bytes, checkpointing=plan.checkpointing)

    def same_for_all(self, keep: Keep, budget_bytes: int) -> Plan:
        """One choice for every layer; for layers that are not fused: are they recomputed as a whole."""
        if self.is_fused:
            return self.price([keep] * self.num_layers, budget_bytes)
        return self._plain(budget_bytes, checkpointing=not keep.mlp)

    @property
    def step_seconds(self) -> float:
        """About what forward and backward passes take, recomputation aside."""
        return 3 * self.layer.forward_s * self.num_layers

    def corrected(self, plan: Plan, dynamic_bytes: int) -> Planner:
        """With the bytes that a step under ``plan`` was measured to take beside what is static."""
        return replace(self, factor=self.factor * dynamic_bytes / max(1, plan.predicted.dynamic))

    @cached_property
    def _order(self) -> list[tuple[float, str]]:
        """Items by the seconds that each byte costs, cheapest first."""
        cost = self.layer
        items = [
            (cost.normed_s / cost.normed, "normed"),
            (cost.attention_s / cost.attention, "attention"),
            (cost.mlp_s / cost.mlp, "mlp"),
            (cost.offload_s / cost.inputs, "offload"),
        ]
        return sorted(items)

    def _bytes(self, keeps: Sequence[Keep]) -> tuple[tuple[int, ...], int]:
        """Bytes kept by each layer, and the rest of the peak."""
        kept = [self.layer.kept(keep) for keep in keeps]
        in_flight = 2 * self.layer.inputs if any(keep.offload for keep in keeps) else 0
        below, peak = 0, sum(kept) + self.head
        for size, keep in zip(kept, keeps, strict=True):
            below += size
            peak = max(peak, below + self.layer.working + self.layer.remade(keep))
        peak = int(self.factor * (peak + in_flight))
        return tuple(int(self.factor * size) for size in kept), peak - sum(int(self.factor * s) for s in kept)

    def _total(self, keeps: Sequence[Keep]) -> int:
        kept, working = self._bytes(keeps)
        return self.static.total + sum(kept) + working

    def _plain(self, budget_bytes: int, *, checkpointing: bool) -> Plan:
        cost = self.layer
        each = int(self.factor * (cost.inputs // 2 if checkpointing else cost.plain))
        working = max(self.head, cost.working + (cost.plain if checkpointing else 0))
        return Plan(
            keeps=(),
            predicted=Prediction(
                static=self.static, kept=(each,) * self.num_layers, working=int(self.factor * working)
            ),
            seconds=cost.forward_s * self.num_layers if checkpointing else 0.0,
            budget_bytes=budget_bytes,
            checkpointing=checkpointing,
        )


def _without(keep: Keep, item: str) -> Keep:
    return replace(keep, **{item: item == "offload"})


def _with(keep: Keep, item: str) -> Keep:
    return replace(keep, **{item: item != "offload"})


def planner(
    config: Mapping[str, Any],
    recipe: Recipe,
    *,
    num_tokens: int,
    sequence_length: int | None = None,
    capability: tuple[int, int] | None = (9, 0),
    dtype_bytes: int = 2,
    **options: Any,
) -> Planner:
    """A planner from config.json and a recipe alone.

    Args:
        config: the mapping in config.json.
        recipe: formats and adapters.
        num_tokens: tokens of a batch, padding included.
        sequence_length: of the longest sequence; None: one sequence is the whole batch.
        capability: of the GPU, for its rates; None: a CPU.
        dtype_bytes: of a value that is not packed.
        options: fields of `Planner` that are known better.
    """
    if num_tokens < 1:
        raise BadInput(f"num_tokens is {num_tokens}; a batch has at least one token.")
    fields: dict[str, Any] = {
        "static": predict_memory(config, recipe, dtype_bytes=dtype_bytes),
        "layer": layer_cost(
            config,
            recipe,
            machine_of(capability),
            num_tokens=num_tokens,
            sequence_length=sequence_length or num_tokens,
            dtype_bytes=dtype_bytes,
        ),
        "num_layers": int(config["num_hidden_layers"]),
        "head": head_bytes(
            config, num_tokens, dtype_bytes=dtype_bytes, fused=options.get("is_fused", True), recipe=recipe
        ),
    }
    return Planner(**{**fields, **options})


def plan(config: Mapping[str, Any], recipe: Recipe, *, budget_bytes: int, **options: Any) -> Plan:
    """The plan of `planner` with the same options that fits ``budget_bytes``."""
    return planner(config, recipe, **options).plan(budget_bytes)
