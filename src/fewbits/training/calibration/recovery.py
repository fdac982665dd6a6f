"""Minutes of distillation after rounding: scales and norms of a packed model learn what the plain one says.

The loss is the KL divergence of the packed model's next-token distributions from the plain model's, on the
user's rows. Trained are the factors of the packed scales (`fewbits.nn.trained_scales`), where a format stores
them in float32, and everything else of one dimension (norms, biases): the recovered folder has the same
format, the same codes and the same size. With a rank, an adapter beside the packed linears is trained too
(`fewbits.training.calibration.recovery_adapter`), and lies in a folder inside. Some windows are held out; if
the divergence there did not fall, the folder is written with what it began with, and the result says so.

The learning rate falls with the time that is used up. What is learned is kept beside the destination every
half minute, and the same call goes on with it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.errors import BadInput, Unsupported
from fewbits.inference.rounding.kept_work import KeptWork, fingerprint, folder_facts
from fewbits.kernels.product.matmul_packed import PLAIN
from fewbits.models.fast import FastLanguageModel
from fewbits.models.folders.checkpoint import inspect_folder
from fewbits.models.folders.one_writer import one_writer
from fewbits.models.folders.whole_folder import check_destination, whole_folder
from fewbits.models.loading.hf_quantizer import write_packed
from fewbits.models.packing.packed import is_packed, put
from fewbits.models.writing.calibration_rows import read_windows
from fewbits.nn.linear import QuantizedLinear
from fewbits.nn.trained_scales import TrainedScales, has_free_scales
from fewbits.training.calibration.recovery_adapter import FOLDER, WithBranch, put_branches, write_adapter
from fewbits.training.calibration.recovery_text import written_windows

_BATCH_TOKENS = 1024  # of a step
_HELD_OUT = 8  # windows at most
_RATE = 6e-3  # of Adam
_BRANCH_RATE = 1e-4  # of what an adapter trains: at 1e-3 it lost in 77 steps what it began with
_MEASURED = 16  # windows, at most, that say what a linear is given
_BETAS = (0.9, 0.98)
_KEEP_S = 30.0  # between two copies on disk
_WINDOWS = 8192  # that are read at most
_NUMBERS, _TEXT = 0, 1  # what is kept on disk, by these numbers
_A, _B = "branch_a", "branch_b"  # the ends of these numbers' names


@dataclass(frozen=True, kw_only=True)
class RecoveryResult:
    """What `recover_checkpoint` wrote.

    Attributes:
        folder: where.
        steps: that were trained, those of interrupted calls included.
        seconds: of training, likewise.
        before: KL in nats a token on the windows held out, as the rounded model was.
        after: as it was written.
        trained: numbers that were trained.
        tokens: of the text.
        written: tokens that the plain model wrote besides.
        adapter: the folder of the adapter, which is to be opened instead of the model's; None: there is none.
        adapter_numbers: that it holds.
    """

    folder: Path
    steps: int
    seconds: float
    before: float
    after: float
    trained: int
    tokens: int
    written: int = 0
    adapter: Path | None = None
    adapter_numbers: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The numbers, for JSON."""
        adapter = None if self.adapter is None else str(self.adapter)
        return {**asdict(self), "folder": str(self.folder), "adapter": adapter}

    @property
    def sentence(self) -> str:
        """What came of it, in one sentence."""
        kinds = "scales, norms and numbers of an adapter" if self.adapter else "scales and norms"
        what = f"{self.steps} steps in {self.seconds:.0f} s trained {self.trained:,} {kinds}"
        if self.after >= self.before:
            return f"{what}, which did not lower the KL of {self.before:.4f} on text held out; none is taken."
        said = f"{what}: KL on text held out {self.before:.4f} before, {self.after:.4f} after"
        if self.adapter is None:
            return f"{said}."
        return (
            f"{said}, with the adapter in {self.adapter} ({self.adapter_numbers:,} numbers): open that"
            " folder, which brings the model along."
        )


@dataclass(frozen=True)
class Recovery:
    """What is to be done after rounding; what makes no sense is refused when it is made, before long work.

    Attributes:
        minutes: of training; loading, writing and measuring come on top.
        rank: of the adapter that is trained too, in "recovery_adapter" inside the destination; 0: none.
        written: tokens of text that the plain model writes to be trained on too, which helps where there are
            few rows; they begin as the rows do.

    Raises:
        BadInput: one of them is no such number.
    """

    minutes: float
    rank: int = 0
    written: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.minutes) and self.minutes > 0):
            raise BadInput(f"{self.minutes:g} minutes recover nothing; give a number above 0, such as 5.")
        if self.rank < 0:
            raise BadInput(
                f"an adapter has no rank of {self.rank}; give one such as 16, or 0 for no adapter."
            )
        if self.written < 0:
            raise BadInput(
                f"no text has {self.written} tokens; give a number such as 1000000, or 0 for none."
            )


def recover_checkpoint(
    source: str | Path,
    rounded: str | Path,
    destination: str | Path,
    rows: str | Path,
    recovery: Recovery,
    *,
    length: int = 512,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> RecoveryResult:
    """Write a packed model whose scales and norms have learned from the plain one.

    Args:
        source: the plain model's folder.
        rounded: a packed folder of the same model, such as `calibrate_checkpoint` writes; it stays.
        destination: the folder to write. Beside it, as ".recovery" after its name, the work is kept.
        rows: JSON Lines with "text" or "messages": the more text, the better.
        recovery: for how long, and what is trained.
        length: tokens of a window.
        overwrite: replace a model that is in the destination.
        progress: called as ``progress(seconds done, seconds in all)``.

    Raises:
        BadInput: too little text, or a destination that is taken or being written.
        Unsupported: ``rounded`` is not packed, is of another model, or has nothing to train.
    """
    target = Path(destination)
    check_destination(target, overwrite=overwrite, protected=[source, rounded])
    with one_writer(target):
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        words: dict[str, Any] = {"device_map": str(device), "load_in_4bit": False}
        teacher, tokenizer = FastLanguageModel.from_pretrained(source, **words)
        model, _ = FastLanguageModel.from_pretrained(rounded, **words)
        _check_pair(teacher, model, source, rounded)
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or length
        size = min(length, positions)
        windows = read_windows(rows, tokenizer, length=size, count=_WINDOWS, least=2 * size).to(device)
        call = fingerprint(source, folder_facts(rounded), str(recovery), windows.cpu())
        kept_work = KeptWork(target, call, suffix=".recovery")
        work = _Learner(model, teacher, windows)
        before = work.divergence()
        if recovery.written:
            work.add_text(recovery.written, kept_work, progress)
        if recovery.rank:
            work.add_branches(recovery.rank, before)
        work.run(60.0 * recovery.minutes, kept_work, progress)
        after = work.divergence()
        if not after < before:  # NaN is no gain
            work.take(work.first)
        work.finish()
        branches = work.branches if after < before else {}
        with whole_folder(target, overwrite=overwrite, protected=[source, rounded]) as folder:
            write_packed(model, folder, published=target)
            tokenizer.save_pretrained(folder)
            inspect_folder(folder)  # what was written reads back
            if branches:
                write_adapter(model, branches, folder / FOLDER, target.absolute())
        kept_work.remove()
    return RecoveryResult(
        folder=target,
        steps=work.steps,
        seconds=work.seconds,
        before=before,
        after=after if after < before else before,
        trained=sum(p.numel() for p in work.trained.values()),
        tokens=windows.numel(),
        written=work.written,
        adapter=target / FOLDER if branches else None,
        adapter_numbers=sum(branch.a.numel() + branch.b.numel() for branch in branches.values()),
    )


def _check_pair(teacher: Any, model: Any, source: str | Path, rounded: str | Path) -> None:
    if is_packed(teacher):
        raise Unsupported(f"{source} is packed already; give the original model to learn from.")
    if not is_packed(model):
        raise Unsupported(f"{rounded} is not packed; quantise it first.")
    sizes = [m.get_input_embeddings().weight.shape for m in (teacher, model)]
    if sizes[0] != sizes[1]:
        raise Unsupported(
            f"{rounded} has embeddings of {tuple(sizes[1])} and {source} of {tuple(sizes[0])}: they are of"
            " different models; name the one that was rounded."
        )


class _Learner:
    """A packed model while it learns."""

    def __init__(self, model: Any, teacher: Any, windows: Tensor) -> None:
        self.model, self.teacher = model.eval(), teacher.eval()
        held_out = min(_HELD_OUT, max(len(windows) // 10, 1))
        self.held_out, self.windows = windows[:held_out], windows[held_out:]
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        self.trained: dict[str, nn.Parameter] = {}
        # A linear that rounds its input too, or computes otherwise, is not what TrainedScales computes.
        linears = [
            (n, m) for n, m in model.named_modules() if type(m) is QuantizedLinear and m.operands == PLAIN
        ]
        self.linears = [n for n, _ in linears]
        self.packed_names = [n for n, m in linears if has_free_scales(m.packed)]
        for name in self.packed_names:
            layer = TrainedScales(model.get_submodule(name))
            put(model, name, layer)
            self.trained[f"{name}.factor"] = layer.factor
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and parameter.is_floating_point() and ".weight_" not in name:
                self.trained[name] = parameter
        if not self.trained:
            raise Unsupported(
                "this model has neither scales of its own nor norms to train; leave it as it is."
            )
        self.branches: dict[str, WithBranch] = {}
        self.steps, self.seconds, self.written = 0, 0.0, 0
        self.order = torch.Generator()
        self._begin()

    def add_text(self, tokens: int, cache: KeptWork, progress: Callable[[int, int], None] | None) -> None:
        """Train on text that the plain model writes, too."""
        earlier = cache.layer(_TEXT)
        if earlier is None:
            windows = written_windows(self.teacher, self.windows, tokens, progress)
            cache.save(_TEXT, {"windows": windows}, {})
        else:
            windows = earlier[0]["windows"].to(self.windows.device)
        self.windows, self.written = torch.cat([self.windows, windows]), windows.numel()

    def add_branches(self, rank: int, before: float) -> None:
        """Train an adapter's branches too, from nothing where their first values raise ``before``, the KL."""
        if not self.linears:
            raise Unsupported(
                "this model has no packed linear that takes its input as it is, so that there is nothing an"
                " adapter could stand beside; leave the rank out."
            )
        windows = self.windows[:_MEASURED]
        self.branches = put_branches(self.model, self.teacher, self.linears, windows, rank)
        if not self.divergence() < before:
            for branch in self.branches.values():
                branch.b.data.zero_()
        for name, branch in self.branches.items():
            self.trained |= {f"{name}.{_A}": branch.a, f"{name}.{_B}": branch.b}
        self._begin()

    def _begin(self) -> None:
        """What is trained, as it is now, to an optimiser."""
        for parameter in self.trained.values():
            parameter.requires_grad_(True)
        self.first = {name: p.detach().clone() for name, p in self.trained.items()}
        # Steps are smaller than bfloat16 can add to a norm, so the optimiser has float32 numbers of its own.
        self.masters = {name: p.detach().float().clone() for name, p in self.trained.items()}
        branches = [m for n, m in self.masters.items() if n.endswith((_A, _B))]
        others = [m for n, m in self.masters.items() if not n.endswith((_A, _B))]
        self.rates = [_RATE, _BRANCH_RATE][: 1 + bool(branches)]
        groups = [{"params": group} for group in (others, branches) if group]
        self.optimizer = torch.optim.Adam(groups, lr=_RATE, betas=_BETAS)

    @torch.no_grad()
    def take(self, tensors: dict[str, Tensor]) -> None:
        """Give the model these numbers, of the trained parameters' shapes."""
        for name, parameter in self.trained.items():
            parameter.copy_(tensors[name])

    def loss(self, windows: Tensor) -> Tensor:
        """KL(teacher || model) in nats a token on windows (B, T)."""
        with torch.no_grad():
            plain = self.teacher(input_ids=windows, use_cache=False).logits.float().log_softmax(-1)
        log_probs = self.model(input_ids=windows, use_cache=False).logits.float().log_softmax(-1)
        loss: Tensor = (plain.exp() * (plain - log_probs)).sum(-1).mean()
        return loss

    @torch.no_grad()
    def divergence(self) -> float:
        """KL on the windows held out."""
        return sum(float(self.loss(window[None])) for window in self.held_out) / len(self.held_out)

    def run(self, limit: float, cache: KeptWork, progress: Callable[[int, int], None] | None) -> None:
        """Train until ``limit`` seconds are used up, those of earlier calls included."""
        self._resume(cache)
        batch = max(_BATCH_TOKENS // self.windows.shape[1], 1)
        written = self.seconds
        while self.seconds < limit:
            begin = time.perf_counter()
            self.order.manual_seed(self.steps)
            picked = torch.randint(len(self.windows), (batch,), generator=self.order)
            loss = self.loss(self.windows[picked.to(self.windows.device)])
            gradients = torch.autograd.grad(loss, list(self.trained.values()))
            is_finite = all(bool(gradient.isfinite().all()) for gradient in (loss, *gradients))
            share = 0.5 * (1 + math.cos(math.pi * self.seconds / limit)) * min(1.0, (self.steps + 1) / 10)
            for rate, group in zip(self.rates, self.optimizer.param_groups, strict=True):
                group["lr"] = rate * share
            for master, gradient in zip(self.masters.values(), gradients, strict=True):
                master.grad = gradient.float()
            if is_finite:  # else the step is left out: one NaN would stay in everything
                self.optimizer.step()
                self.take(self.masters)
            self.steps, self.seconds = self.steps + 1, self.seconds + time.perf_counter() - begin
            if self.seconds - written > _KEEP_S:
                self._keep(cache)
                written = self.seconds
            if progress is not None:
                progress(min(int(self.seconds), int(limit)), int(limit))

    def _keep(self, cache: KeptWork) -> None:
        tensors = {f"value.{name}": master for name, master in self.masters.items()}
        for name, master in self.masters.items():
            state = self.optimizer.state[master]
            tensors |= {f"mean.{name}": state["exp_avg"], f"square.{name}": state["exp_avg_sq"]}
        counts = torch.tensor([self.steps, self.seconds], dtype=torch.float64)
        cache.save(_NUMBERS, {**tensors, "counts": counts}, {})

    def _resume(self, cache: KeptWork) -> None:
        state = cache.layer(_NUMBERS)
        if state is None:
            return
        tensors = state[0]
        self.steps, self.seconds = int(tensors["counts"][0]), float(tensors["counts"][1])
        for name, master in self.masters.items():
            master.copy_(tensors[f"value.{name}"])
            self.optimizer.state[master] = {
                "step": torch.tensor(float(self.steps), dtype=torch.float32),
                "exp_avg": tensors[f"mean.{name}"].to(master),
                "exp_avg_sq": tensors[f"square.{name}"].to(master),
            }
        self.take(self.masters)

    def finish(self) -> None:
        """Fold the factors into the scales, and put the packed linears back, without their branches."""
        for name, branch in self.branches.items():
            put(self.model, name, branch.linear)
        for name in self.packed_names:
            layer: Any = self.model.get_submodule(name)
            put(self.model, name, layer.fold())
