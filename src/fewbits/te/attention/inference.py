"""`InferenceParams`: keys and values of earlier tokens, in whole rows or in pages."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.te.layers.module import refuse
from fewbits.te.support import default_device


class InferenceParams:
    """A cache of keys and values for generation, one for all layers of a model.

    A step is `pre_step` with the sequences of the batch and how many tokens each gets, then one forward pass.
    A sequence that a step does not name is dropped and its room is free again.

    Args:
        max_batch_size: sequences at a time.
        max_sequence_length: tokens a sequence.
        num_heads_kv: heads of keys and values.
        head_dim_k: size of a head of keys.
        dtype: of the cache.
        head_dim_v: of values; None is as of keys.
        is_paged: keep tokens in pages, of which each sequence has as many as it needs.
        total_num_pages: pages for all sequences of a layer.
        page_size: tokens a page.
        max_ctx_len: tokens that a step may add; not needed.
        qkv_format: of the queries: "bshd", "sbhd" or "thd".
        custom_cache_manager: refused.
    """

    def __init__(
        self,
        max_batch_size: int,
        max_sequence_length: int,
        num_heads_kv: int | None = None,
        head_dim_k: int | None = None,
        dtype: torch.dtype | None = None,
        head_dim_v: int | None = None,
        is_paged: bool = False,
        total_num_pages: int | None = None,
        page_size: int | None = None,
        max_ctx_len: int | None = None,
        qkv_format: str = "bshd",
        custom_cache_manager: Any = None,
    ) -> None:
        refuse(custom_cache_manager is not None, "custom_cache_manager", "use the cache of this class")
        if num_heads_kv is None or head_dim_k is None or dtype is None:
            raise BadInput(
                "InferenceParams needs num_heads_kv, head_dim_k and dtype: what a cached token is."
            )
        if is_paged and (not page_size or not total_num_pages or max_sequence_length % page_size):
            raise BadInput(
                "a paged cache needs total_num_pages and a page_size that divides max_sequence_length."
            )
        self.max_batch_size, self.max_sequence_length = max_batch_size, max_sequence_length
        self.is_paged, self.qkv_format = is_paged, qkv_format
        self.sizes, self.dtype = (head_dim_k, head_dim_v or head_dim_k), dtype
        self.heads = num_heads_kv
        # without pages a sequence has one page, as long as a sequence may become
        self.page_size = page_size if is_paged and page_size else max_sequence_length
        self.num_pages = total_num_pages if is_paged and total_num_pages else max_batch_size
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}
        self.reset()

    def reset(self) -> None:
        """Forget all sequences."""
        self.sequences: OrderedDict[int, int] = OrderedDict()
        self.sequences_pre_step: OrderedDict[int, int] = OrderedDict()
        self.steps: list[int] = []
        self.pages: dict[int, list[int]] = {}
        self.free = list(range(self.num_pages))[::-1]

    def allocate_memory(self, layer_number: int) -> None:
        """Make a layer's cache; the first step does it too."""
        if layer_number not in self.cache:
            shape = (self.num_pages, self.page_size, self.heads)
            keys, values = (
                torch.zeros(*shape, size, dtype=self.dtype, device=default_device(None))
                for size in self.sizes
            )
            self.cache[layer_number] = keys, values

    def pre_step(self, step_dict: OrderedDict[int, int]) -> OrderedDict[int, int]:
        """Begin a step.

        Args:
            step_dict: tokens that each sequence of the batch gets, in the batch's order.

        Returns:
            Tokens that each will then have.
        """
        if len(step_dict) > self.max_batch_size:
            raise BadInput(
                f"{len(step_dict)} sequences are more than the cache's max_batch_size {self.max_batch_size}."
            )
        for gone in set(self.sequences) - set(step_dict):
            self.free += self.pages.pop(gone)
        before = OrderedDict((name, self.sequences.get(name, 0)) for name in step_dict)
        after = OrderedDict((name, before[name] + step) for name, step in step_dict.items())
        for name, length in after.items():
            if length > self.max_sequence_length:
                raise BadInput(
                    f"sequence {name} would have {length} tokens, and the cache's max_sequence_length is "
                    f"{self.max_sequence_length}."
                )
            held = self.pages.setdefault(name, [])
            while len(held) * self.page_size < length:
                if not self.free:
                    raise BadInput(
                        f"all {self.num_pages} pages of the cache are taken: raise total_num_pages."
                    )
                held.append(self.free.pop())
        self.sequences_pre_step, self.sequences, self.steps = before, after, list(step_dict.values())
        return after

    def get_seqlens_pre_step(self) -> Tensor:
        """Tokens that each sequence had before this step: (b,) int32."""
        return torch.tensor(
            list(self.sequences_pre_step.values()), dtype=torch.int32, device=default_device(None)
        )

    def step(
        self, layer_number: int, new_k: Tensor, new_v: Tensor, qkv_format: str
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Add this step's keys and values of a layer.

        Args:
            layer_number: of the layer.
            new_k: (b, s, h, d), (s, b, h, d) or (t, h, d), by the format: of each sequence the first tokens.
            new_v: likewise.
            qkv_format: "bshd", "sbhd" or "thd".

        Returns:
            All keys and values (b, longest, h, d), and cumulative lengths of queries and keys (b + 1,).
        """
        if not self.steps:
            raise BadInput("call pre_step before the forward pass: it says which sequences the batch has.")
        self.allocate_memory(layer_number)
        starts = torch.tensor([0, *self.steps]).cumsum(0).tolist()
        lengths = list(self.sequences.values())
        gathered = []
        for cache, new in zip(self.cache[layer_number], (new_k, new_v), strict=True):
            rows = new.transpose(0, 1) if qkv_format.startswith("sbhd") else new
            whole = cache.new_zeros(len(lengths), max(lengths), *cache.shape[2:])
            for i, (name, length) in enumerate(self.sequences.items()):
                step = self.steps[i]
                tokens = rows[starts[i] : starts[i + 1]] if qkv_format.startswith("thd") else rows[i, :step]
                place = torch.arange(length, device=cache.device)
                page = torch.tensor(self.pages[name], device=cache.device)[place // self.page_size]
                added = place[length - step :]
                cache[page[length - step :], added % self.page_size] = tokens.detach().to(cache.dtype)
                whole[i, :length] = cache[page, place % self.page_size]
            gathered.append(whole)
        bounds = [
            torch.tensor([0, *n], device=new_k.device).cumsum(0).to(torch.int32)
            for n in (self.steps, lengths)
        ]
        return gathered[0], gathered[1], bounds[0], bounds[1]

    def step_attention(
        self, layer_number: int | None, k: Tensor, v: Tensor, layout: str
    ) -> tuple[str, Tensor, Tensor, tuple[Tensor, Tensor]]:
        """`step` as attention calls it: the layout of queries and cache, keys, values, cumulative lengths."""
        keys, values, q_bounds, kv_bounds = self.step(layer_number or 1, k, v, layout)
        both = layout if layout == "bshd" else f"{layout}_2bshd"
        return both, keys.to(k.dtype), values.to(v.dtype), (q_bounds, kv_bounds)
