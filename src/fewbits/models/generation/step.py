"""One step of decoding as few kernels: from the next tokens to their logits, in one CUDA graph.

A decoder layer is five launches: norm, q, k and v; attention over the cache with rotary and appending; the
output projection, added to the residual stream; norm, gate, up and activation; down, added again. The stream
stays in float32. Kernels of Hopper and later ask for their weights before the kernel before them has ended.
Adapters stay unmerged: their inner values are begun by the kernel that makes a product's input, else they
are one more small launch in front of it, and their other side is added inside it.

Which models: those whose layers are norm, attention, norm, gated MLP, each added to the stream, as the
family's spec names them. Nothing is taken on trust: a `DecodeStep` can be compared with the model it is made
for, by one token through both ways (`DecodeStep.difference`), and whoever uses it refuses it if the logits
differ by more than rounding explains. `why_not` says in one sentence why a model has none.

Inside a step nothing is read back to the host. Memory: keys and values for ``room`` tokens, in 16 bits or
few.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.decoder.limits import why_not_by_spec
from fewbits.decoder.parts import KERNEL_ACTIVATIONS
from fewbits.errors import BadInput, NotFused, SpecMismatch, Unsupported
from fewbits.families.shapes import field_of, scores_factor, window_of
from fewbits.formats.base import Packed
from fewbits.formats.kv_cache import KVCache
from fewbits.host.spec import layer_names, locate, spec_for
from fewbits.host.unwrap import unwrap
from fewbits.kernels.generation.cut import max_rows
from fewbits.kernels.generation.decode_attention import Cache, DecodeAttention, Rules, begins_inner
from fewbits.kernels.generation.operands import (
    LowRankSum,
    Product,
    part_reserve,
    takes_inner,
    takes_parts,
)
from fewbits.kernels.generation.packed_attention import PackedKeysValues
from fewbits.kernels.generation.rank_sum import RankSum
from fewbits.kernels.launch import nvrtc
from fewbits.models.generation.adapters_by_row import AdaptersByRow
from fewbits.models.generation.branches import Reader, StepBranches, norm_of
from fewbits.models.generation.model_state import is_sharded
from fewbits.models.generation.packed_keys import packed_layer
from fewbits.models.generation.products import DecodedWeights
from fewbits.models.generation.step_cache import StepCache
from fewbits.models.generation.step_limits import built_differently, changed_by
from fewbits.models.generation.step_products import StepProducts, described
from fewbits.models.generation.step_ranks import StepRanks, ranks_of
from fewbits.models.generation.step_rotary import rope_kind, tables_of


def why_not(model: Any) -> str:
    """Why decoding of ``model`` cannot be one of these steps; "" if nothing speaks against trying."""
    try:
        spec = spec_for(model)
    except Unsupported as error:
        return str(error)
    if spec.generic:
        return spec.without_spec
    config = model.config.get_text_config()
    reason = why_not_by_spec(spec, config) or built_differently(spec, config)
    if reason is not None:
        return f"layers of {spec.model_type} are built differently: {reason}"
    if changed_by(spec, config):
        return f"{spec.model_type} changes {' and '.join(changed_by(spec, config))}"
    if rope_kind(model) in ("dynamic", "longrope"):
        return f"the rotary embedding {rope_kind(model)!r} depends on the length"
    if is_sharded(model):
        return "its weights are sharded over several processes"
    devices = {p.device for p in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        return "the model is not on one GPU"
    if nvrtc.missing() is not None:
        return str(nvrtc.missing())
    if torch.cuda.get_device_capability(next(iter(devices))) < (8, 0):
        return "its kernels need compute capability 8.0 or later"
    return ""


class DecodeStep:
    """The step of one model for a number of sequences.

    Attributes:
        tokens: (batch,) int64: what the next step takes in.
        position: (batch,) int64: where in the cache it goes; `advance` counts on.
        first: (batch,) int64: the first position of each sequence that is seen (padding stands before).
        logits: (batch, vocabulary) float32: of the last step.
        keys, values: of each layer (batch, kv_heads, room, head size); without tokens where packed ones are.
        packed: keys and values in few bits, by layer.
        beside: the step on whose keys and values this one works, or None.
        ranks: those that share the model's layers, or None.
        launches: kernels of ours in a step.
    """

    def __init__(
        self,
        model: Any,
        *,
        batch: int,
        room: int,
        beside: DecodeStep | None = None,
        together: bool = False,
        kv_cache: KVCache | None = None,
        adapters: Sequence[str] = (),
        keep_decoded: bool = True,
    ) -> None:
        """Make buffers and prepare all launches.

        Args:
            model: a causal language model for which `why_not` has nothing to say.
            batch: sequences.
            room: tokens of each, prompt included.
            beside: a step of this model with as much room, whose cache this one works on: that of its first
                ``batch`` sequences. Positions and tokens are its own.
            together: with ``beside``: all rows are tokens of its first sequence, each at its own position,
                and each sees those that stand before it.
            kv_cache: in which formats keys and values are kept; None: as the model computes them.
            adapters: names of those that rows can have (`choose`); (): the active one in all rows.
            keep_decoded: whether decoded weights of many rows may stay, where there is memory for them.

        Raises:
            Unsupported: something in the model that the kernels do not take; the message says what.
        """
        spec = spec_for(model)
        self.batch, self.room, self.spec = batch, room, spec
        self.beside, self._together, self.kv_cache = beside, together, kv_cache
        self.products: StepProducts
        if beside is not None and (kv_cache != beside.kv_cache or (together and kv_cache)):
            name = (kv_cache or beside.kv_cache or KVCache()).name
            raise Unsupported(f"guesses are verified over keys and values in 16 bits, not in {name}.")
        base = unwrap(model)
        self._embed = model.get_submodule(locate(model, spec, spec.embed))
        if adapters and hasattr(self._embed, "lora_embedding_A"):
            raise Unsupported("the embeddings have adapters, which no step chooses by row.")
        weight = next(self._embed.parameters())
        self.device, self.dtype = weight.device, base.get_submodule(self._final_norm).weight.dtype
        if self.dtype not in (torch.bfloat16, torch.float16):
            raise Unsupported(f"the model computes in {self.dtype}; decoding's kernels take 16 bits.")
        self._early = self.device.type == "cuda" and torch.cuda.get_device_capability(self.device) >= (9, 0)
        self._calls: list[Callable[[], Tensor]] = []
        self.adapters = tuple(adapters)
        self._adapters = StepBranches(self.dtype, AdaptersByRow(self.adapters) if adapters else None)
        self.packed: dict[int, PackedKeysValues] = {}
        whole = {"dtype": torch.long, "device": self.device}
        self.tokens, self.position, self.first = (torch.zeros(batch, **whole) for _ in range(3))
        self._graph: torch.cuda.CUDAGraph | None = None
        self._hidden = self._buffer(self._embedded().shape[-1], torch.float32)
        group = ranks_of(model)
        self.ranks = None if group is None else StepRanks(group, self._hidden)
        if self.ranks is not None and self.ranks.direct is None:
            self._early = False  # behind another library's kernels
        try:
            self._cosines, self._sines = tables_of(base, spec, room, self.dtype, self.device)
            layers = [model.get_submodule(name) for name in layer_names(model, spec)]
            self.cache = self._cache_of(layers)
            self.keys, self.values = map(self._own_rows, (self.cache.keys, self.cache.values))
            shared: DecodedWeights | None = None if beside is None else beside.products.decoded
            self.products = StepProducts(
                model, batch, self.dtype, self.device, early=self._early, decoded=shared, keep=keep_decoded
            )
            head = self._head_of(model)
            self.logits = self._buffer(head.parts[0].width, torch.float32)
            share = None if self.ranks is None else self.ranks.share_of_head(head, self.logits)
            if share is not None:
                self._calls.append(self.logits.zero_)
            for i, layer in enumerate(layers):
                self._add_layer(
                    i, layer, self._attention_inputs(layers[i + 1]) if i + 1 < len(layers) else head
                )
            self._add_head(head, share)
        except (NotFused, SpecMismatch, BadInput, AttributeError) as error:
            # Of a module that was replaced by one of another build, attributes are missing.
            raise Unsupported(f"{str(error).rstrip('.')}.") from error

    @property
    def _final_norm(self) -> str:
        assert self.spec.final_norm is not None  # as every written spec has one
        return self.spec.final_norm

    @property
    def early(self) -> bool:
        """Whether kernels start before those in front of them have ended."""
        return self._early

    @property
    def rotary_tables(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines (room, rotary) float32."""
        return self._cosines, self._sines

    @property
    def launches(self) -> int:
        """Kernels of ours in a step."""
        return len(self._calls)

    def takes(self, batch: int) -> bool:
        """Whether it is one of so many sequences."""
        return batch == self.batch

    def refresh(self) -> None:
        """Take over the newest values of the adapters, and of weights that stay decoded."""
        self._adapters.refresh()
        if self.products.decoded is not None:
            self.products.decoded.refresh()

    def choose(self, rows: Sequence[str]) -> None:
        """Give each row the adapter of this name; only where the step was made with ``adapters``."""
        if self._adapters.by_row is not None:
            self._adapters.by_row.choose(rows)

    @torch.no_grad()
    def run(self) -> Tensor:
        """One step, launch by launch; `logits` (B, V). The position stays."""
        self._hidden.copy_(self._embedded())
        for call in self._calls:
            call()
        return self.logits

    def advance(self) -> Tensor:
        """One step (B, V), then the position moves on; on a GPU a CUDA graph, recorded at the first call."""
        if self.device.type != "cuda":
            self.run()
            self.position.add_(1)
            return self.logits
        if self._graph is None:
            self._graph = self._recorded()
        self._graph.replay()
        return self.logits

    @torch.no_grad()
    def difference(self, model: nn.Module, cache: Any, attention_mask: Tensor | None) -> float:
        """The relative difference of this step's logits to those of the model's own forward.

        Args:
            model: the model.
            cache: its own cache of what stands before; it is changed by the model's forward.
            attention_mask: (batch, tokens before and one more), or None.
        """
        ours = self.run().clone()
        out = model(
            input_ids=self.tokens[:, None],
            position_ids=(self.position - self.first)[:, None],
            attention_mask=attention_mask,
            past_key_values=cache,
            use_cache=True,
        )
        theirs = out.logits[:, -1].float()
        return float((ours - theirs).norm() / theirs.norm())

    def _embedded(self) -> Tensor:
        return self._embed(self.tokens)  # type: ignore[no-any-return]

    def _buffer(self, columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(self.batch, columns, dtype=dtype, device=self.device)

    def _recorded(self) -> torch.cuda.CUDAGraph:
        with torch.cuda.device(self.device), torch.no_grad():
            side, current = torch.cuda.Stream(), torch.cuda.current_stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                self.run()  # kernels are compiled; it writes what the graph will write again
            current.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # Other threads (of a data loader that pins memory, of NCCL) go on calling CUDA meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.run()
                self.position.add_(1)
        return graph

    def _attention_inputs(self, layer: nn.Module) -> Reader:
        """What reads the stream first in a layer."""
        facts, norm = self.spec.attention, self.spec.norm
        assert facts is not None
        parts = [self._adapters.part(layer, path) for path in facts.inputs]
        return Reader(parts, norm_of(layer, norm.before_attention, self.spec))

    def _add_layer(self, number: int, layer: nn.Module, after: Reader) -> None:
        """Launches of a layer, behind which ``after`` reads the stream."""
        facts, norm = self.spec.attention, self.spec.norm
        assert facts is not None
        attention: Any = layer.get_submodule(facts.path)
        config, D = attention.config, attention.head_dim
        kv_heads = self._own_heads(config.num_key_value_heads)
        heads = kv_heads * attention.num_key_value_groups
        qkv, attended = (
            self._buffer((heads + 2 * kv_heads) * D, torch.float32),
            self._buffer(heads * D, self.dtype),
        )
        self._add_product(self._hidden, self._attention_inputs(layer), qkv)
        rules = Rules(
            scale=scores_factor(facts, config, D),
            window=window_of(facts, config, attention),
            q_norm=None if norm.query is None else norm_of(layer, norm.query, self.spec),
            k_norm=None if norm.key is None else norm_of(layer, norm.key, self.spec),
        )
        output = Reader([self._adapters.part(layer, facts.output)])
        self._add_attention(number, qkv, attended, rules, output)
        inputs = self._mlp_inputs(layer)
        self._add_to_stream(attended, output, inputs)
        self._add_mlp(layer, config, inputs, after)

    def _add_attention(
        self, number: int, qkv: Tensor, attended: Tensor, rules: Rules, output: Reader
    ) -> None:
        """What attends to a layer's keys and values, appends to them, and begins what reads the result."""
        keys, values = self.keys[number], self.values[number]
        D = keys.shape[3]
        kind = self._kind_of(rules.window)
        if kind is not None:
            packed, packed_call = packed_layer(self, number, kind, qkv, attended, rules)
            self.packed[number] = packed
            self._calls.append(packed_call.launch)
            return
        cache = Cache(keys, values, self._cosines, self._sines, self.position, self.first)
        begins = begins_inner(keys, attended.shape[1] // D, output.ranks)
        begins = begins and self._one_call(output, output.padded)
        inner = self._adapters.begin(attended, output) if begins else None
        call = DecodeAttention(qkv, cache, attended, rules, early=self._early, after=inner)
        self._calls.append(call.launch)
        if self._together:
            # The first launch writes new keys and values of all rows; what it attends to is not whole yet.
            # The second one writes the same again, and must not read ahead of the first.
            call = DecodeAttention(qkv, cache, attended, rules, early=False, after=inner)
            self._calls.append(call.launch)
        if call.next_sums is not None:
            self._adapters.leave(attended, call.next_sums, output.ranks)

    def _kind_of(self, window: int) -> KVCache | None:
        """How a layer's keys and values are packed; None for those of a window, which stay in 16 bits."""
        return None if window else self.kv_cache

    def _cache_of(self, layers: Sequence[nn.Module]) -> StepCache:
        """Keys and values of all layers in 16 bits; those in few bits have no room here."""
        if self.beside is not None:
            return self.beside.cache
        facts, shapes = self.spec.attention, []
        assert facts is not None
        for layer in layers:
            attention: Any = layer.get_submodule(facts.path)
            config = attention.config
            packed = self._kind_of(window_of(facts, config, attention)) is not None
            room = 0 if packed else self.room
            heads = self._own_heads(config.num_key_value_heads)
            shapes.append((self.batch, heads, room, attention.head_dim))
        return StepCache(shapes, self.dtype, self.device)

    def _own_rows(self, whole: Sequence[Tensor]) -> list[Tensor]:
        """Of each layer's keys or values the rows of this step, which may be fewer than the cache has."""
        if self._together:
            return [layer[:1].expand(self.batch, -1, -1, -1) for layer in whole]
        return [layer[: self.batch] for layer in whole]

    def _mlp_inputs(self, layer: nn.Module) -> Reader:
        """What reads the stream behind attention."""
        mlp = self.spec.mlp
        assert mlp is not None
        parts = [self._adapters.part(layer, path) for path in mlp.inputs]
        return Reader(parts, norm_of(layer, self.spec.norm.before_mlp, self.spec))

    def _add_mlp(self, layer: nn.Module, config: Any, inputs: Reader, after: Reader) -> None:
        mlp = self.spec.mlp
        assert mlp is not None
        name = field_of(config, mlp.activation)
        activation = KERNEL_ACTIVATIONS.get(name)
        if activation is None:
            raise Unsupported(f"no kernel has the activation {name!r}.")
        down = Reader([self._adapters.part(layer, mlp.output)])
        inner = self._buffer(inputs.parts[0].width, self.dtype)
        self._add_product(self._hidden, inputs, inner, activation=activation, after=down)
        self._add_to_stream(inner, down, after)

    def _head_of(self, model: nn.Module) -> Reader:
        part = self._adapters.part(model, locate(model, self.spec, self.spec.head))
        return Reader([part], norm_of(model, locate(model, self.spec, self._final_norm), self.spec))

    def _add_head(self, head: Reader, share: tuple[Reader, Tensor, RankSum] | None) -> None:
        """The logits: of the whole head, or of this rank's share of it and then of all."""
        if share is None:
            self._add_product(self._hidden, head, self.logits)
            return
        reader, columns, sum_over_ranks = share
        self._add_product(self._hidden, reader, columns)
        self._calls.append(sum_over_ranks.launch)

    def _one_call(self, reader: Reader, ranks: int) -> bool:
        """Whether kernels for few rows have all rows at once, beside so many branches' inner values."""
        reserve = part_reserve(self.batch, ranks)
        rows = min(max_rows(part.weight, reserve) for part in reader.parts)
        return rows >= self.batch

    def _begins(self, reader: Reader, after: Reader) -> bool:
        """Whether the kernel of one product begins inner values of the branches of the next one."""
        return (
            takes_parts(self.batch, after.ranks)
            and self._one_call(reader, reader.padded + after.padded)
            and self._one_call(after, after.padded)
        )

    def _own_heads(self, count: int) -> int:
        """How many of so many heads are this rank's."""
        return count if self.ranks is None else count // self.ranks.group.size

    def _add_to_stream(self, x: Tensor, reader: Reader, after: Reader) -> None:
        """What is added to the stream, by all ranks that share the layers; ``after`` reads it next."""
        if self.ranks is None:
            self._add_product(x, reader, self._hidden, add=True, after=after)
            return
        self._add_product(x, reader, self._hidden, add=self.ranks.goes_on)
        self._calls.append(self.ranks.launch)

    def _add_product(
        self,
        x: Tensor,
        reader: Reader,
        out: Tensor,
        *,
        activation: str | None = None,
        add: bool = False,
        after: Reader | None = None,
    ) -> None:
        """The launches of one product, for as many rows at a time as fit; ``after`` reads ``out`` next."""
        parts, norm = reader.parts, reader.norm
        inner = self._adapters.take_up(x, reader) or self._inner_values(x, reader)
        following = None
        if after is not None and self._begins(reader, after):
            following = self._adapters.begin(out, after)
        weights = [part.weight for part in parts]
        sizes = {w.shape[0] for w in weights} if activation else {sum(w.shape[0] for w in weights)}
        if sizes != {out.shape[1]} or {w.shape[1] for w in weights} != {x.shape[1]}:
            raise Unsupported(f"{described(weights[0])} are not of the sizes that the config gives.")
        groups = (
            [list(range(len(parts)))] if activation or _alike(weights) else [[i] for i in range(len(parts))]
        )
        begin = 0
        for group in groups:
            chosen = [weights[i] for i in group]
            columns = out.shape[1] if len(groups) == 1 else chosen[0].shape[0]
            make, rows = self.products.of(chosen)
            for m in range(0, self.batch, rows):
                cut = slice(m, m + rows)
                product = Product(
                    x[cut],
                    chosen,
                    out[cut, begin : begin + columns],
                    biases=[parts[i].bias for i in group],
                    branches=[None if (branch := inner[i]) is None else branch.rows(cut) for i in group],
                    norm=norm,
                    activation=activation,
                    add=add,
                    next=following,
                )
                call = make(product)
                self._calls.append(call.launch)
                if following is not None and after is not None:
                    self._adapters.leave(out, call.next_sums, after.ranks)
            begin += columns

    def _inner_values(self, x: Tensor, reader: Reader) -> list[LowRankSum | None]:
        """The branches with their inner values ``x A^T``, of the product itself or of a launch in front."""
        if not reader.branches:
            return [None] * len(reader.parts)
        inner = self._buffer(sum(reader.ranks), torch.float32)
        beside = self.products.by_batch_rows and takes_inner(x) and self._adapters.by_row is None
        branches, weights = self._adapters.whole(reader, inner, beside)
        if not beside:
            make, rows = self.products.of(weights)
            for m in range(0, self.batch, rows):
                cut = slice(m, m + rows)
                self._calls.append(make(Product(x[cut], weights, inner[cut], norm=reader.norm)).launch)
        self._calls.extend(self._adapters.masks(reader, inner))
        return branches


def _alike(weights: Sequence[Packed | Tensor]) -> bool:
    kinds = {w.format if isinstance(w, Packed) else w.dtype for w in weights}
    return len(kinds) == 1 and len(weights) <= 3
