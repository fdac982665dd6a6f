"""Who competes: our configurations and the peers, by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from fewbits.errors import BadInput


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One way to train.

    Attributes:
        name: ``side:what``, and for ours a memory budget after an @, as in "ours:nf4@24" (GiB).
        weights: the format in which the base weights are stored.
        compute: "bf16" or "float8": the operands of the products.
        rounding: what the parity check rounds in its own arithmetic to find out how far this may be off:
            "bf16", "fp8_row" (E4M3, a scale a row), "fp8_row_head" (the head's products as well) or
            "fp8_tensor" (E4M3, gradients E5M2, one scale each).
        packages: must be installed.
        adapters: dtype of the LoRA parameters; None: all weights train.
        autocast: whether the step runs under autocast(bfloat16).
        recompute: "none", "layers" (gradient checkpointing of each) or the side's own word.
        compiled: torch.compile of each decoder layer.
        liger_loss: Liger's head and loss without logits.
        float8_head: the output head multiplies in FP8 too.
        delayed: FP8 scales of the MLP's inner tensors come from earlier steps; the parity check then looks at
            the first step and at a later one.
        budget: what ours may take: GiB, "auto", or "keep", "recompute", "offload" for all layers alike; None:
            as `fewbits.decoder.fuse.fuse` leaves it.
        runs_on_cpu: also there, for a test.
        peak_gib: about what it takes for the Llama-3.1-8B shape and 8,192 tokens; decides only which
            processes may hold memory side by side.
    """

    name: str
    weights: str
    compute: str = "bf16"
    rounding: str = "bf16"
    packages: tuple[str, ...] = ()
    adapters: str | None = "bfloat16"
    autocast: bool = False
    recompute: str = "none"
    compiled: bool = False
    liger_loss: bool = False
    float8_head: bool = False
    delayed: bool = False
    budget: float | str | None = None
    runs_on_cpu: bool = False
    peak_gib: float = 40.0

    @property
    def side(self) -> str:
        """Whose it is: "ours", "hf", "bnb", "liger", "unsloth" or "torchao"."""
        return self.name.partition(":")[0]

    @property
    def trains_all(self) -> bool:
        """Full fine-tuning."""
        return self.adapters is None

    @property
    def format(self) -> str:
        """Weights, and the products' operands where they are not bfloat16."""
        if self.compute == "bf16":
            return self.weights
        return f"{self.weights} {self.compute}{' head too' if self.float8_head else ''}"


_TRL: dict[str, Any] = {"adapters": "bfloat16", "autocast": True}  # the dtypes TRL's trainer gives QLoRA
_OWN: dict[str, Any] = {"adapters": "float32", "autocast": True}  # PEFT's and Unsloth's defaults
_FULL: dict[str, Any] = {"weights": "bf16", "adapters": None}
_FP8: dict[str, Any] = {"compute": "float8", "rounding": "fp8_row"}
_TORCHAO: dict[str, Any] = {"compute": "float8", "rounding": "fp8_tensor", "compiled": True}
_BNB = ("peft", "bitsandbytes")
_LIGER = ("peft", "liger_kernel")


def _hf() -> list[Configuration]:
    bf16: dict[str, Any] = {"weights": "bf16", "packages": ("peft",), **_OWN}
    fast: dict[str, Any] = {"packages": _LIGER, "compiled": True, "liger_loss": True}
    return [
        Configuration(name="hf:bf16", runs_on_cpu=True, peak_gib=81, **bf16),
        Configuration(name="hf:bf16-gc", recompute="layers", peak_gib=30, **bf16),
        Configuration(name="hf:bf16-compiled", weights="bf16", peak_gib=51, **fast),
        Configuration(name="hf:full-bf16", **_FULL, **fast),
    ]


def _nf4_peers() -> list[Configuration]:
    bnb: dict[str, Any] = {"weights": "nf4_dq", "packages": _BNB, **_TRL}
    liger = {**bnb, "packages": (*_BNB, "liger_kernel")}
    unsloth: dict[str, Any] = {"weights": "nf4_dq", "packages": ("unsloth",), **_OWN}
    return [
        Configuration(name="bnb:nf4", runs_on_cpu=True, peak_gib=63, **bnb),
        Configuration(name="bnb:nf4-gc", recompute="layers", peak_gib=20, **bnb),
        Configuration(name="liger:nf4", peak_gib=41, **liger),
        Configuration(name="liger:nf4-gc", recompute="layers", peak_gib=20, **liger),
        Configuration(name="unsloth:nf4", peak_gib=37, **unsloth),
        Configuration(name="unsloth:nf4-gc", recompute="unsloth", peak_gib=20, **unsloth),
    ]


def _torchao() -> list[Configuration]:
    both: dict[str, Any] = {**_TORCHAO, "packages": ("peft", "torchao")}
    liger: dict[str, Any] = {**_TORCHAO, "packages": ("torchao", "liger_kernel"), "liger_loss": True}
    return [
        Configuration(name="torchao:fp8", weights="bf16", peak_gib=62, **both),
        Configuration(name="torchao:full-fp8", **_FULL, **both),
        Configuration(name="torchao:full-fp8-liger", **_FULL, **liger),
    ]


def _ours() -> list[Configuration]:
    nf4: dict[str, Any] = {"weights": "nf4_dq", "packages": ("peft",), "runs_on_cpu": True}
    bf16: dict[str, Any] = {"weights": "bf16", "packages": ("peft",), "runs_on_cpu": True}
    delayed: dict[str, Any] = {**_FP8, "delayed": True}
    plain = [
        Configuration(name="ours:nf4", peak_gib=38, **nf4),
        Configuration(name="ours:nf4-fp8", peak_gib=42, **nf4, **delayed),
        Configuration(
            name="ours:fp8",
            weights="e4m3_128x128",
            packages=("peft",),
            runs_on_cpu=True,
            peak_gib=46,
            **delayed,
        ),
        Configuration(name="ours:bf16", peak_gib=50, **bf16),
        Configuration(name="ours:bf16-fp8", peak_gib=54, **bf16, **delayed),
        Configuration(name="ours:full-bf16", runs_on_cpu=True, **_FULL),
        Configuration(name="ours:full-fp8", runs_on_cpu=True, **_FULL, **delayed),
    ]
    heads = [
        replace(c, name=f"{c.name}-head", float8_head=True, rounding="fp8_row_head", peak_gib=c.peak_gib + 2)
        for c in plain
        if c.compute == "float8"
    ]
    return plain + heads


def _peers() -> list[Configuration]:
    return [*_hf(), *_nf4_peers(), *_torchao()]


_POLICIES = {"auto": 125.0, "keep": 60.0, "recompute": 20.0, "offload": 20.0}  # GiB that they may hold
CONFIGURATIONS = {one.name: one for one in (*_ours(), *_peers())}
PEERS = ("hf", "bnb", "liger", "unsloth", "torchao")


def configuration(name: str) -> Configuration:
    """A configuration by its name.

    Raises:
        BadInput: there is none.
    """
    plain, _, budget = name.partition("@")
    chosen = CONFIGURATIONS.get(plain)
    if chosen is None or (budget and chosen.side != "ours"):
        names = ", ".join(CONFIGURATIONS)
        raise BadInput(
            f"{name!r} is no configuration: known are {names}; ours also as ours:nf4@24, a budget."
        )
    if not budget:
        return chosen
    if budget in _POLICIES:
        return replace(chosen, name=name, budget=budget, recompute=budget, peak_gib=_POLICIES[budget])
    try:
        gib = float(budget)
    except ValueError:
        raise BadInput(f"{budget!r} in {name!r} is neither GiB nor one of {', '.join(_POLICIES)}.") from None
    return replace(chosen, name=name, budget=gib, recompute=f"in {gib:g} GiB", peak_gib=max(gib, 20.0))


def choose(names: str | None, peers: str, *, on_cpu: bool) -> list[Configuration]:
    """What the options ask for, in their order: our configurations and then the peers'.

    Args:
        names: of configurations, with commas between; None: ours:nf4 and ours:nf4-fp8.
        peers: "all", "none", or sides with commas between, whose LoRA configurations are added.
        on_cpu: leave out what needs a GPU.

    Raises:
        BadInput: an unknown name.
    """
    chosen = [configuration(n) for n in (names or "ours:nf4,ours:nf4-fp8").split(",") if n]
    sides = PEERS if peers == "all" else tuple(s for s in peers.split(",") if s not in ("", "none"))
    for side in sides:
        if side not in PEERS:
            raise BadInput(f"{side!r} is no peer: known are {', '.join(PEERS)}, all and none.")
        chosen += [c for c in _peers() if c.side == side and not c.trains_all]
    unique = {c.name: c for c in chosen}
    return [c for c in unique.values() if c.runs_on_cpu or not on_cpu]


def missing(config: Configuration) -> list[str]:
    """The packages that this configuration needs and this installation lacks."""
    return [name for name in config.packages if find_spec(name) is None]
