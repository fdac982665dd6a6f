"""Which layers keep what for the backward pass, so that a training step fits a memory budget and waits least.

Every layer has five things that it may give up, each with the bytes that it frees and the seconds that it
costs to have it again (`fewbits.decoder.keep.Keep`). The planner gives them up in the order of bytes freed
per second, one layer at a time and the first layers first, until the predicted peak fits; then it takes back
what the last one freed in excess. The peak is that of the backward pass walking from the last layer to the
first: what a layer makes again is there only while it is at work. The last layer is at work while all others
still hold what they keep: giving up one of its products frees nothing then, but it does for the head and the
loss, which come before, and giving up both products, a norm's output or values of weights always frees
something.

The five, for M tokens, hidden size H, inner size I and N_qkv outputs of q, k and v, in 2 bytes a value:

    what a layer gives up     frees (bytes)          costs in the backward pass
    values of weights         2 * N * K a product    decoding them again
    the norms' outputs        2 * 2 * M * H          one pass over memory each
    the gate_up product       2 * M * 2 * I          norm and product again: 4 * M * H * I operations
    q, k, v and attention     2 * M * (N_qkv + H)    norm, product and attention again
    its two inputs            2 * 2 * M * H          a copy to the host and back, beside the arithmetic

The planner divides each row's bytes by its seconds, gives up the best row of layer 0, then of layer 1, then
the next best row, and stops where the peak fits.

Predicted bytes come from shapes alone; the first step's measured peak corrects them (`Planner.corrected`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from fewbits.decoder.keep import Keep
from fewbits.decoder.limits import why_not_attention
from fewbits.errors import BadInput
from fewbits.families.catalog import LLAMA
from fewbits.families.registry import written_spec
from fewbits.host.sharding import stays_gathered
from fewbits.models.adapting.predicted_memory import predict_memory
from fewbits.models.packing.model_shapes import LayerShapes, layer_shapes, model_of_config, numbers_of
from fewbits.models.plan.layer_cost import LayerCost, layer_cost, machine_of
from fewbits.recipes import Recipe
from fewbits.recipes.standing_memory import Memory, head_copies

GIB = 2**30
# One chunk of logits, as fewbits.kernels.loss.linear_cross_entropy cuts them, and its form with 8-bit
# products.
_LOGITS_BYTES, _LOGITS8_BYTES = 512 << 20, 256 << 20
_STEP_DOWN = 0.85  # what the next smaller plan may use of the one that did not fit


def head_bytes(
    config: Mapping[str, Any],
    num_tokens: int,
    *,
    dtype_bytes: int = 2,
    fused: bool = True,
    recipe: Recipe | None = None,
) -> int:
    """Working bytes of head and loss: one chunk of logits, or with the model's own loss all of them.

    With 8-bit products also their gradient and the rows; copies of a weight that trains are made each time,
    and so is the decoded weight of a packed head.
    Where it trains, dW is summed in float32, and a chunk may take as many bytes.
    """
    hidden, vocabulary = int(config["hidden_size"]), int(config["vocab_size"])
    states = 3 * num_tokens * hidden * dtype_bytes
    logits = num_tokens * vocabulary * dtype_bytes
    if not fused:  # transformers keeps the logits, widens them to float32 and takes the gradient of that
        return states + logits + logits // dtype_bytes * 8
    is_plain = recipe is None or replace(recipe.head, weight=None).is_plain
    if recipe is not None and recipe.head.weight is not None:
        states += hidden * vocabulary * dtype_bytes  # a packed head, decoded for the step
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
    from fewbits.decoder.loss import float8_head_of  # it defines kernels, which takes time

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
class MemoryPlan:
    """A choice for every layer, and what is expected of it.

    Attributes:
        keeps: one a layer; empty for a model whose layers are not fused.
        predicted: bytes by purpose.
        seconds: what making again what is not kept is expected to take in one step.
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
        return f"{what}; {size}; {self.seconds * 1e3:.1f} ms a step to make the rest again"


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
        can_keep_weights: whether values of frozen weights may stay from step to step.
        is_fused: False: only whole-layer checkpointing by transformers can be chosen.
    """

    static: Memory
    layer: LayerCost
    num_layers: int
    head: int
    factor: float = 1.0
    can_offload: bool = True
    can_keep_weights: bool = True
    is_fused: bool = True

    def plan(self, budget_bytes: int) -> MemoryPlan:
        """The plan that fits and costs the fewest seconds; the smallest one if none fits (see ``fits``)."""
        if not self.is_fused:
            plan = self._plain(budget_bytes, checkpointing=False)
            return plan if plan.fits else self._plain(budget_bytes, checkpointing=True)
        plans = [self._greedy(budget_bytes, offload=False)]
        if self.can_offload:
            plans.append(self._greedy(budget_bytes, offload=True))
        return min(plans, key=lambda p: (0, p.seconds) if p.fits else (1, float(p.predicted.total)))

    def _greedy(self, budget_bytes: int, *, offload: bool) -> MemoryPlan:
        """Begin with all kept, and give up one item of one layer after the other until the rest fits.

        Items go in the order of `_order`, the fewest seconds for a byte first, from the first layer on. Last,
        what was given up in vain is taken back: a later item may have freed so much that it fits again.
        """
        weights = self.can_keep_weights and self.layer.weights > 0
        everything = Keep(normed=self.layer.normed > 0, weights=weights)
        keeps = [everything] * self.num_layers  # one for each layer, from the first
        freed: list[tuple[float, str, int]] = []  # seconds for a byte, the item, the layer
        for cost, item in self._order:
            if item != "offload" and not getattr(everything, item):
                continue
            for i in range(self.num_layers):
                if (item == "offload" and not offload) or self._total(keeps) <= budget_bytes:
                    break
                keeps[i] = _give_up(keeps[i], item)
                freed.append((cost, item, i))
        for _, item, i in sorted(freed, key=lambda g: (-g[0], -g[2])):  # dearest first, from the last layer
            tried = list(keeps)
            tried[i] = _take_back(keeps[i], item)
            if self._total(tried) <= max(budget_bytes, self._total(keeps)):  # or where nothing fits: no worse
                keeps = tried
        return self.price(keeps, budget_bytes)

    def smaller(self, plan: MemoryPlan) -> MemoryPlan | None:
        """The next plan that needs clearly less than ``plan``; None if there is none."""
        static, dynamic = self.static.total, plan.predicted.dynamic
        below = self.plan(static + int(dynamic * _STEP_DOWN))
        if below.predicted.dynamic >= 0.98 * dynamic:
            return None
        return replace(below, budget_bytes=plan.budget_bytes)

    def price(self, keeps: Sequence[Keep], budget_bytes: int = 0) -> MemoryPlan:
        """What is expected of a given choice."""
        by_layer, working = self._bytes(keeps)
        seconds = sum(self.layer.seconds(keep) for keep in keeps)
        predicted = Prediction(static=self.static, kept=by_layer, working=working)
        return MemoryPlan(keeps=tuple(keeps), predicted=predicted, seconds=seconds, budget_bytes=budget_bytes)

    def price_of(self, plan: MemoryPlan) -> MemoryPlan:
        """What this planner expects of another one's plan."""
        if plan.keeps:
            return self.price(plan.keeps, plan.budget_bytes)
        return self._plain(plan.budget_bytes, checkpointing=plan.checkpointing)

    def same_for_all(self, keep: Keep, budget_bytes: int) -> MemoryPlan:
        """One choice for every layer; for layers that are not fused: are they recomputed as a whole."""
        if self.is_fused:
            return self.price([keep] * self.num_layers, budget_bytes)
        return self._plain(budget_bytes, checkpointing=not keep.mlp)

    @property
    def step_seconds(self) -> float:
        """About what forward and backward passes take, making anything again aside."""
        return 3 * self.layer.forward_s * self.num_layers

    def corrected(self, plan: MemoryPlan, dynamic_bytes: int) -> Planner:
        """With the bytes that a step under ``plan`` was measured to take beside what is static."""
        return replace(self, factor=self.factor * dynamic_bytes / max(1, plan.predicted.dynamic))

    @cached_property
    def _order(self) -> list[tuple[float, str]]:
        """Items by the seconds that each byte costs, cheapest first."""
        cost = self.layer
        items = [
            (cost.weights_s / max(cost.weights, 1), "weights"),
            (cost.normed_s / max(cost.normed, 1), "normed"),
            (cost.attention_s / cost.attention, "attention"),
            (cost.mlp_s / cost.mlp, "mlp"),
            (cost.offload_s / cost.inputs, "offload"),
        ]
        return sorted(items)

    def _bytes(self, keeps: Sequence[Keep]) -> tuple[tuple[int, ...], int]:
        """Bytes kept by each layer, and the rest of the peak."""
        by_layer = [self.layer.kept_bytes(keep) for keep in keeps]
        in_flight = 2 * self.layer.inputs if any(keep.offload for keep in keeps) else 0
        below, peak = 0, sum(by_layer) + self.head
        for size, keep in zip(by_layer, keeps, strict=True):
            below += size
            peak = max(peak, below + self.layer.working + self.layer.remade(keep))
        peak = int(self.factor * (peak + in_flight))
        kept_bytes = tuple(int(self.factor * size) for size in by_layer)
        return kept_bytes, peak - sum(kept_bytes)

    def _total(self, keeps: Sequence[Keep]) -> int:
        by_layer, working = self._bytes(keeps)
        return self.static.total + sum(by_layer) + working

    def _plain(self, budget_bytes: int, *, checkpointing: bool) -> MemoryPlan:
        cost = self.layer
        each = int(self.factor * (cost.inputs // 2 if checkpointing else cost.plain))
        working = max(self.head, cost.working + (cost.plain if checkpointing else 0))
        return MemoryPlan(
            keeps=(),
            predicted=Prediction(
                static=self.static, kept=(each,) * self.num_layers, working=int(self.factor * working)
            ),
            seconds=cost.forward_s * self.num_layers if checkpointing else 0.0,
            budget_bytes=budget_bytes,
            checkpointing=checkpointing,
        )


def _give_up(keep: Keep, item: str) -> Keep:
    """``keep`` with less on the GPU: without an item, or with its inputs moved to the host."""
    return replace(keep, **{item: item == "offload"})


def _take_back(keep: Keep, item: str) -> Keep:
    """The inverse of `_give_up`."""
    return replace(keep, **{item: item != "offload"})


def planner(
    config: Mapping[str, Any],
    recipe: Recipe,
    *,
    num_tokens: int,
    sequence_length: int | None = None,
    capability: tuple[int, int] | None = (9, 0),
    dtype_bytes: int = 2,
    shapes: LayerShapes | None = None,
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
        shapes: of a model that is there.
        options: fields of `Planner` that are known better.

    Raises:
        BadInput: there are no tokens, or the configuration does not tell its shapes.
    """
    if num_tokens < 1:
        raise BadInput(f"num_tokens is {num_tokens}; a batch has at least one token.")
    numbers = numbers_of(config)
    spec = written_spec(numbers) if numbers.get("model_type") else LLAMA
    if "num_layers" not in options:
        is_fused = spec is not None and why_not_attention(spec, numbers) is None
        options.setdefault("is_fused", is_fused)
    if shapes is None and (spec is None or spec.attention is None or spec.mlp is None):
        shapes = layer_shapes(model_of_config(config))
    if "static" not in options:
        options["static"] = predict_memory(config, recipe, dtype_bytes=dtype_bytes)
    fields: dict[str, Any] = {
        "layer": layer_cost(
            numbers,
            recipe,
            machine_of(capability),
            num_tokens=num_tokens,
            sequence_length=sequence_length or num_tokens,
            dtype_bytes=dtype_bytes,
            shapes=shapes,
        ),
        "num_layers": int(numbers["num_hidden_layers"]),
        "head": head_bytes(
            numbers, num_tokens, dtype_bytes=dtype_bytes, fused=options.get("is_fused", True), recipe=recipe
        ),
    }
    return Planner(**{**fields, **options})


def plan(config: Mapping[str, Any], recipe: Recipe, *, budget_bytes: int, **options: Any) -> MemoryPlan:
    """The plan of `planner` with the same options that fits ``budget_bytes``."""
    return planner(config, recipe, **options).plan(budget_bytes)
