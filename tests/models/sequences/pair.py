"""Two equal models, one of them fused, that get the same calls; and the comparison of what they give."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fewbits.decoder.fuse import fuse, fused_layers, fusion_of, scales_of
from tests.models.sequences.changing import ChangingCalls
from tests.models.sequences.computing import ComputingCalls
from tests.models.sequences.exact import (
    FLIPS,
    FLOAT8_ROUNDOFF,
    Results,
    allowed,
    error_of,
    is_near,
    roundoff,
    shake,
    wider,
)
from tests.models.sequences.expected import Differs, Placed, Watch, expected
from tests.models.sequences.float8 import Histories, define, fills_no_cache, forget, histories_of
from tests.models.sequences.setup import PLANS, Setup
from tests.models.sequences.turned_into import TurningCalls
from tests.models.tiny import VOCAB

PLAIN, FUSED, EXACT, NOISY = "plain", "fused", "exact", "noisy"
FURTHER_DRAWS = 8  # of the noise, where a result lies past the bound that the first one gives


class Pair(ComputingCalls, ChangingCalls, TurningCalls):
    """Two models and what has been done to them.

    Attributes:
        plain: the model as transformers and PEFT compute it.
        fused: its twin.
        role: which model a call is being made of: PLAIN, FUSED, or a copy of the plain one (EXACT, NOISY).
        placed: hooks and the like that are in place.
        watch: holds every call of a fused layer against what must be.
        counts: comparisons by how they ended.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup, self.dtype, self.random = setup, setup.torch_dtype, random.Random(setup.seed)
        self.role, self.said, self.rounded = PLAIN, [""], setup.recipe == "qat"
        self.few_bits = False  # whether this call rounds to few bits
        self.padded = False  # whether it has a batch with padding
        self.undo: list[Callable[[], None]] = []
        self.counts: Counter[str] = Counter()
        self.placed = Placed()
        self.watch = Watch(self.placed)
        self.plain, self.fused = setup.model(), setup.model()
        self.weight = None if setup.recipe in ("none", "qat", "fp8", "fp8, head fp8") else setup.recipe
        self.define()
        self.fuse(first=True)

    def call(self, name: str, seed: int) -> None:
        """Make a call of both models; what it chooses depends on ``seed``, and on their state.

        Raises:
            Differs: they do not agree, or a layer ran otherwise than it must.
        """
        self.random, self.said = random.Random(seed), []
        self.placed.cache_asked = self.few_bits = self.padded = False
        with self.watch.on():
            getattr(self, name)()
        self.watch.check()
        self.sync_histories()

    def choose(self, *of: Any) -> Any:
        """One of these."""
        return self.random.choice(of)

    def note(self, text: str) -> None:
        """Add to what was chosen in this call."""
        self.said.append(text)

    # 1. The models.

    def new_plan(self) -> Any:
        """What layers keep that are fused again."""
        return self.choose(None, *PLANS)

    def fuse(self, first: bool = False) -> None:
        """Fuse the one; as many layers as must be are then."""
        plan = (None if self.setup.plan is None else PLANS[self.setup.plan]) if first else self.new_plan()
        fuse(self.fused, keep=plan, delayed_scaling=self.setup.delayed)
        if self.histories is not None:
            self.histories.clear()
        count = len(fused_layers(self.fused))
        must = self.setup.fused_layers
        if count != must:
            raise Differs(f"{count} layers are fused, and {must} must be: {fusion_of(self.fused).receipt}")

    def define(self) -> None:
        """Have the plain twin round where fused FP8 products do, in the calls that must run fused."""
        self.histories: Histories | None = None
        if not self.setup.is_float8 or not self.setup.fused_layers:
            return
        forget(self.plain)
        inner = self.plain.get_base_model() if hasattr(self.plain, "get_base_model") else self.plain
        define(list(inner.model.layers), self.setup.delayed, MustBeFused(self.placed))
        inner.model.register_forward_pre_hook(fills_no_cache, with_kwargs=True)
        self.histories = histories_of(self.plain)

    def sync_histories(self) -> None:
        """Both go on from the same magnitudes, as they do from the same gradients."""
        state = scales_of(self.fused) if self.histories is not None else {}
        if state and self.histories is not None:
            self.histories.amax.copy_(state["amax"])
            self.histories.history.copy_(state["history"])
            self.histories.used[:] = [bool(used) for used in state["recorded"].tolist()]

    def magnitudes(self, model: Any) -> Results:
        """What a model has recorded of its FP8 tensors' magnitudes, by name, if scales are delayed."""
        if self.role == FUSED:
            state = scales_of(model) if self.histories is not None else {}
            return {name: state[name].clone() for name in ("amax", "history") if state}
        histories = histories_of(model)
        if histories is None or not histories.begun:
            return {}
        return {"amax": histories.amax.clone(), "history": histories.history.clone()}

    @property
    def both(self) -> tuple[Any, Any]:
        """The plain model and the fused one."""
        return self.plain, self.fused

    @property
    def adapters(self) -> list[str]:
        """Names of the adapters."""
        return list(getattr(self.plain, "peft_config", {}))

    @property
    def merged(self) -> bool:
        """Whether some adapter is in the base's weights."""
        return any(getattr(m, "merged_adapters", None) for m in self.plain.modules())

    @property
    def drops(self) -> bool:
        """Whether a pass draws random numbers."""
        dropouts = any(isinstance(m, torch.nn.Dropout) and m.p and m.training for m in self.plain.modules())
        return dropouts or (self.plain.training and bool(self.setup.attention_dropout))

    # 2. Comparing.

    def made_of(self, model: Any, role: str, call: Callable[[Any], Any], seed: int) -> Results:
        """What a call of one model gives, by name."""
        torch.manual_seed(seed)
        self.role = role
        try:
            result = call(model)
        finally:
            self.role = PLAIN
        return {"": result} if isinstance(result, Tensor) else result

    def copies(self, u: float) -> tuple[Any, Any]:
        """The plain model in the wider dtype, and that rounded."""
        exact, noisy = (wider(self.plain, self.dtype, self.padded) for _ in range(2))
        return exact, self._shaken(noisy, u, 0)

    def _shaken(self, model: Any, u: float, draw: int) -> Any:
        """A wider copy, rounded by the random numbers of this draw."""
        u = max(u, FLIPS) if self.setup.is_float8 or self.rounded or self.few_bits else u
        head = FLOAT8_ROUNDOFF if self.setup.recipe.endswith("head fp8") else 0.0
        return shake(model, u, 17 + draw, head)

    def compare(
        self, what: str, call: Callable[[Any], Any], *, u: float | None = None, copies: Any = None
    ) -> Results:
        """Make the same call of both, and compare all that it gives; the bound is `exact`'s.

        Args:
            what: in words.
            call: gives a tensor, or tensors by name; those called "logits" serve the bound alone.
            u: of the products, where it is not that of the models' dtype.
            copies: made before, where the models have changed since.

        Returns:
            What the plain model gave.
        """
        self.sync_histories()
        narrow = u is not None or self.dtype != torch.float32 or self.setup.device != "cpu"
        u = roundoff(self.dtype, self.setup.device) if u is None else u
        seed = self.random.randrange(10**6)
        if copies is None and (narrow or self.setup.is_float8):
            copies = self.copies(u)
        plain = self.made_of(self.plain, PLAIN, call, seed)
        fused = self.made_of(self.fused, FUSED, call, seed)
        names = [name for name in plain if name != "logits"]
        if names != [name for name in fused if name != "logits"]:
            raise Differs(f"{what}: {sorted(set(plain) ^ set(fused))[:3]} in one only")
        for name in names:
            a, b = fused[name], plain[name]
            if a.shape != b.shape or not torch.equal(a.isfinite(), b.isfinite()):
                raise Differs(f"{what} {name}: other shapes, or finite in one and not in the other")
        far = [name for name in names if narrow or not is_near(fused[name], plain[name])]
        self.counts["the same to 32 roundings of float32"] += len(names) - len(far)
        if far:
            self._judge(what, far, plain, fused, call, seed, u, copies or self.copies(u))
        return plain

    def _judge(
        self, what: str, names: list[str], plain: Results, fused: Results, call: Any, seed: int, u: float,
        copies: Any,
    ) -> None:  # fmt: skip
        exact = self.made_of(copies[0], EXACT, call, seed)
        noisy = self.made_of(copies[1], NOISY, call, seed)
        for name in [n for n in names if n not in exact]:  # zeros that stood there, which a copy has not
            exact[name] = noisy[name] = torch.zeros_like(plain[name])
        for name in names:
            if plain[name].isfinite().all() and not exact[name].isfinite().all():
                raise Differs(f"{what} {name}: the wider copy gives no number to compare with")
        far = list(names)
        for draw in range(1 + FURTHER_DRAWS):
            if draw:
                model = copy.deepcopy(copies[0])
                model.zero_grad(set_to_none=True)
                noisy = self.made_of(self._shaken(model, u, draw), NOISY, call, seed)
                noisy |= {name: torch.zeros_like(plain[name]) for name in far if name not in noisy}
            left = [n for n in far if not error_of(n, fused, exact) <= allowed(n, plain, exact, noisy, u)]
            self.counts[f"within the bound{' of another draw' if draw else ''}"] += len(far) - len(left)
            far = left
            if not far:
                return
        (name, *_) = far
        error, bound = error_of(name, fused, exact), allowed(name, plain, exact, noisy, u)
        size = float(exact[name].double().norm())
        raise Differs(
            f"{what} {name}: off by {error:.2g} of {size:.2g}, where {bound:.2g} is explained"
            f" (the plain one is off by {error_of(name, plain, exact):.2g})"
        )

    def same_text(self, call: Callable[[Any], Any]) -> Any:
        """What ``call`` makes of both must be the same tokens, where no rounding to few bits decides."""
        seed = self.random.randrange(10**6)
        results = []
        for model, role in zip(self.both, (PLAIN, FUSED), strict=True):
            torch.manual_seed(seed)
            self.role = role
            results.append(call(model))
        self.role = PLAIN
        a, b = results
        self.counts["texts"] += 1
        decides = self.dtype != torch.float32 or self.setup.is_float8  # prompts go through fused FP8 products
        if not decides and not (torch.equal(a, b) if isinstance(a, Tensor) else a == b):
            raise Differs(f"text: {a} and {b}")
        return a

    def each(self, call: Callable[[Any], Any]) -> tuple[Any, Any]:
        """The same call of both, under the same random numbers."""
        seed = self.random.randrange(10**6)
        results = []
        for model, role in zip(self.both, (PLAIN, FUSED), strict=True):
            torch.manual_seed(seed)
            self.role = role
            results.append(call(model))
        self.role = PLAIN
        return results[0], results[1]

    # 3. Batches.

    def batch(self, *, labels: bool = True) -> dict[str, Any]:
        """Rows of tokens, with padding or not."""
        rows, length = self.choose(1, 2, 3), self.choose(3, 8, 13)
        generator = torch.Generator().manual_seed(self.random.randrange(10**6))
        ids = torch.randint(3, VOCAB, (rows, length), generator=generator)
        kinds = ("none", "none", "packed", "added", "left", "right", "both")
        # What stands at padding is anybody's; a delayed scale sees it, and so do scales over tokens.
        kind = self.choose(*kinds[:4] if self.setup.is_float8 else kinds)
        ids = ids.to(self.setup.device)
        batch: dict[str, Any] = {"input_ids": ids}
        mask = torch.ones_like(ids)
        if kind in ("left", "both"):
            mask[0, : length // 2] = 0
        if kind in ("right", "both"):
            mask[-1, length - 1 :] = 0
        if labels:
            masked = self.random.random() < 0.7 and kind in ("left", "right", "both")
            batch["labels"] = ids.masked_fill(mask == 0, -100) if masked else ids.clone()
        if kind in ("left", "right", "both"):
            self.padded, batch["attention_mask"] = True, mask
        elif kind == "packed" and length > 3:
            cut = length // 2
            positions = torch.cat([torch.arange(cut), torch.arange(length - cut)])
            batch["position_ids"] = positions.repeat(rows, 1).to(ids.device)
            batch["use_cache"] = False  # with a cache transformers does not see that these are several rows
        elif kind == "added":
            visible = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
            batch["attention_mask"] = visible.repeat(rows, 1, 1, 1)
        self.note(f"{kind} {rows}x{length}")
        return batch

    def fit(self, batch: dict[str, Any], model: Any) -> dict[str, Any]:
        """A mask of every pair of tokens in the form that transformers adds to scores of this model."""
        mask = batch.get("attention_mask")
        if mask is None or mask.dtype != torch.bool:
            return batch
        dtype = model.get_input_embeddings().weight.dtype
        if self.role in (FUSED, PLAIN):
            dtype = self.dtype
        added = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(
            ~mask, torch.finfo(dtype).min
        )
        return {**batch, "attention_mask": added}

    @staticmethod
    def seen(batch: dict[str, Any]) -> Any:
        """Tokens that are no padding: what stands at the others is anybody's."""
        mask = batch.get("attention_mask")
        return slice(None) if mask is None or mask.dim() != 2 else mask.bool()


class MustBeFused:
    """Whether a call of a plain layer is one that must run fused in its twin.

    A copy of a model goes on with the same record of what is in place.
    """

    def __init__(self, placed: Placed) -> None:
        self.placed = placed

    def __call__(self, layer: Any, number: int, has_cache: bool, kwargs: dict[str, Any]) -> bool:
        """By `expected`."""
        others = {k: v for k, v in kwargs.items() if k == "output_attentions"}
        return not expected(layer, number, self.placed, has_cache, others)

    def __deepcopy__(self, memo: Any) -> MustBeFused:
        return self
