"""How far stochastic products are from exact ones: on given operands, and on what a model's linears multiply.

error = sc(a, b) - a b^T, in float64
mse = mean(error**2)     bias = mean(error)     worst = max |error|     relative = |error| / |a b^T| (norms)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.formats.stochastic import SCRAMBLES, Stochastic
from fewbits.formats.streams import product_tables
from fewbits.nn.stochastic.product import stochastic_product

Operands = Mapping[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class ProductError:
    """Figures of one product, or of several taken together.

    Attributes:
        mse: mean squared error.
        relative: norm of the error over the norm of the exact product.
        bias: mean error.
        worst: largest error.
        values: how many values the products have.
    """

    mse: float
    relative: float
    bias: float
    worst: float
    values: int

    def as_dict(self) -> dict[str, float | int]:
        """Plain data for JSON."""
        return asdict(self)


def product_error(operands: Operands, options: Stochastic) -> ProductError:
    """The error of ``a b^T`` over all pairs of operands, (N, D) and (M, D) or batches of them."""
    squares = energy = total = worst = 0.0
    count = 0
    for name, (a, b) in operands.items():
        _check_pair(name, a, b)
        with torch.no_grad():
            exact = a.double() @ b.double().mT
            error = stochastic_product(a, b, options).double() - exact
        squares += float(error.square().sum())
        energy += float(exact.square().sum())
        total += float(error.sum())
        worst = max(worst, float(error.abs().max()) if error.numel() else 0.0)
        count += error.numel()
    if not count:
        raise BadInput("there are no operands to multiply; give at least one pair of rows.")
    relative = (squares / energy) ** 0.5 if energy else 0.0
    return ProductError(mse=squares / count, relative=relative, bias=total / count, worst=worst, values=count)


def _check_pair(name: str, a: Tensor, b: Tensor) -> None:
    fits = a.dim() == b.dim() and a.dim() in (2, 3) and a.shape[-1] == b.shape[-1]
    if not fits or a.shape[:-2] != b.shape[:-2]:
        raise BadInput(
            f"{name}: a is {tuple(a.shape)} and b {tuple(b.shape)}; give (N, D) and (M, D), or batches."
        )
    if not (a.numel() and b.numel()):
        raise BadInput(
            f"{name}: a is {tuple(a.shape)} and b {tuple(b.shape)}, so there is nothing to multiply; leave"
            " this pair out, or give at least one row of at least one value."
        )
    if not (a.isfinite().all() and b.isfinite().all()):
        raise BadInput(f"{name} has NaN or infinite values; the error of a product needs finite ones.")


def settings_of(
    base: Stochastic, lengths: Sequence[int], scrambles: Sequence[str], halves: Sequence[bool]
) -> list[Stochastic]:
    """Every combination that exists: halved streams are at most half as long, none longer than planned.

    A base whose groups share cells has no other scramble, and takes no part in ``scrambles``.

    Raises:
        BadInput: none exists, or a length that no stream of these bits has.
    """
    unknown = [s for s in scrambles if s not in SCRAMBLES]
    if unknown:
        raise BadInput(f"scramble {unknown[0]!r} is unknown; choose from {', '.join(SCRAMBLES)}.")
    too_long = [length for length in lengths if length > 2**base.sc_prec]
    if too_long:
        raise BadInput(
            f"a stream length of {too_long[0]} is out of range: streams of {base.sc_prec} bits have at most "
            f"{2**base.sc_prec} steps; give shorter ones."
        )
    scrambles = (base.scramble,) if base.scramble == "cells" else scrambles
    settings = [
        replace(base, halve_bipolar_stoc_len=half, scramble=scramble, stoc_len=length, rng_levels=None)
        for half in halves
        for scramble in scrambles
        for length in lengths
        if length <= min(2 ** (base.sc_prec - half), base.longest)
    ]
    if not settings:
        raise BadInput(
            f"no stream length of {list(lengths)} fits{'' if False in halves else ' halved'} streams of "
            f"{base.sc_prec} bits"
            f"{f' planned for {base.planned_len} steps' if base.planned_len else ''}; give shorter ones."
        )
    return settings


def table_error(options: Stochastic, dimensions: int) -> Tensor:
    """``T(u, w) / L - u w / Q^2`` over the magnitudes u of a and w of b, (Q + 1, Q + 1) float32.

    The mean over the product tables of so many dimensions. Where signs are in the streams, u and w are codes
    from -Q to Q. Of OR-ed groups it is a product that is alone in its group.
    """
    streams, masks = options.streams, options.masks(dimensions)
    tables = product_tables(streams, tuple(sorted(set(masks))), torch.device("cpu"))
    weights = torch.tensor([masks.count(mask) for mask in sorted(set(masks))], dtype=torch.float32)
    mean = torch.einsum("t,tuw->uw", weights / weights.sum(), tables.float()) / streams.length
    lowest = -streams.max_code if streams.signed else 0
    magnitudes = torch.arange(lowest, streams.max_code + 1) / streams.max_code
    return mean - magnitudes[:, None] * magnitudes


def read_operands(path: Path | str) -> dict[str, tuple[Tensor, Tensor]]:
    """Pairs "a" (M, K) and "b" (N, K) of a .npz or .safetensors file, or "NAME.a" and "NAME.b".

    Raises:
        BadInput: another kind of file, or names that make no pairs.
    """
    path = Path(path)
    tensors = _read_tensors(path)
    pairs = {name.removesuffix("a").rstrip("."): name for name in tensors if name.split(".")[-1] == "a"}
    operands = {
        prefix or "a b^T": (tensors[name].float(), tensors[f"{name[:-1]}b"].float())
        for prefix, name in pairs.items()
        if f"{name[:-1]}b" in tensors
    }
    if not operands:
        raise BadInput(
            f"{path} holds no pair of operands (it has {', '.join(sorted(tensors)) or 'nothing'}); name them "
            "a and b, or NAME.a and NAME.b."
        )
    return operands


def _read_tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise BadInput(f"there is no file {path}; check the path.")
    try:
        if path.suffix == ".npz":
            import numpy as np

            with np.load(path, allow_pickle=False) as arrays:
                return {n: torch.from_numpy(arrays[n]) for n in arrays.files if arrays[n].dtype.kind in "fiu"}
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return dict(load_file(path))
    except (OSError, ValueError, RuntimeError) as error:
        raise BadInput(f"{path} cannot be read ({' '.join(str(error).split())[:100]}).") from error
    raise BadInput(f"{path} is neither .npz nor .safetensors; save the operands as one of them.")


def capture_operands(
    model: Any, ids: Tensor, names: Iterable[str], *, rows: int = 64, seed: int = 0
) -> dict[str, tuple[Tensor, Tensor]]:
    """Rows of the input and the weight of each named linear, from one forward pass of token ids (B, T)."""
    generator = torch.Generator().manual_seed(seed)
    operands: dict[str, tuple[Tensor, Tensor]] = {}

    def hook(name: str) -> Any:
        def keep(module: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
            x = args[0].detach().flatten(0, -2).float()
            picked = torch.randperm(len(x), generator=generator)[:rows]
            operands[name] = (x[picked.to(x.device)], module.weight.detach().float())

        return keep

    handles = [model.get_submodule(name).register_forward_hook(hook(name)) for name in names]
    try:
        with torch.no_grad():
            model(input_ids=ids.to(model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return operands
