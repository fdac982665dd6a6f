"""The stop at the first bad number, without the host waiting for the device in every step.

What a step's losses and gradients are worth is computed on the device and copied to the host; the host reads
it one step later, or before anything is logged, evaluated or saved. In the meantime nothing bad comes into
the weights: the same flag on the device makes a fused optimizer skip its update (``found_inf``, which
torch's fused optimizers have for gradient scalers). Where the optimizer knows no such flag, or a scaler uses
it, the host waits in each step.

With several ranks a step is sound if it is so on every rank: one short sum over them a step tells, so all
stop at the same step, with the sentence of the rank that saw the bad number. The same sum tells all of
them that one was asked to stop by a signal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fewbits.errors import TrainingStopped

if TYPE_CHECKING:
    from torch.optim import Optimizer

Seen = list[tuple[Tensor, list[list[int]]]]  # loss and rows of each accumulated batch


@dataclass
class _Pending:
    """What is known of one step once its copy has arrived."""

    seen: Seen
    trained: list[nn.Parameter]  # what had a gradient, in the model's order
    step: int
    scaled: bool
    values: Tensor  # on the host: of all ranks bad losses and wishes to stop, losses, gradients' norms
    event: Any


class NumberCheck:
    """Watches one model's losses and gradients."""

    def __init__(
        self,
        model: nn.Module,
        *,
        num_ranks: int = 1,
        is_sharded: bool = False,
        exchange: Callable[[Any], list[Any]] = lambda value: [value],
        stop_asked: Callable[[], bool] = lambda: False,
    ) -> None:
        """Nothing is seen yet.

        Args:
            model: the model.
            num_ranks: processes that train it.
            is_sharded: a rank sees parts of the gradients only; otherwise all have the same ones.
            exchange: gives every rank's value; called by all of them at a step that was not sound.
            stop_asked: whether this rank was asked to stop.
        """
        self._asked, self._others_asked = stop_asked, False
        self._model = model
        self._num_ranks, self._is_sharded, self._exchange = num_ranks, is_sharded, exchange
        self._pending: _Pending | None = None
        self._first: tuple[int, float] | None = None  # the first sound step, and its loss

    def see(self, batches: Seen, step: int, optimizer: Any = None, *, scaled: bool = False) -> None:
        """After the backward passes of a step, before clipping: note what they gave, settle the step before.

        Args:
            batches: loss and rows of each accumulated batch.
            step: its number, for the message.
            optimizer: the one that is about to step; without the flag the host waits here.
            scaled: a gradient scaler is at work, which itself skips steps that overflow.

        Raises:
            TrainingStopped: a loss or a gradient is not finite, or all gradients are zero.
        """
        self.settle()
        # Without names, which take a walk of 10 ms through a packed model of 32 layers.
        trained = [p for p in self._model.parameters() if p.grad is not None]
        losses = torch.stack([loss.float().mean() for loss, _ in batches])
        local = [_local(p.grad) for p in trained if p.grad is not None]
        norms = [g.float().to(losses.device) for g in torch._foreach_norm(local)] if local else []
        stop = losses.new_full((), float(self._asked()))
        bad = torch.stack([(~losses.isfinite().all()).float(), stop])
        values = self._of_all(bad, torch.stack(norms) if norms else losses.new_zeros(0))
        skips = not scaled and can_skip(optimizer)
        if skips:
            sound = values.isfinite().all() & (values[0] == 0) & (values[2:].sum() > 0)
            inner_optimizer(optimizer).found_inf = (~sound).float()
        host, event = _to_host(torch.cat([values[:2], losses, values[2:]]))
        self._pending = _Pending(batches, trained, step, scaled, host, event)
        if not skips:
            self.settle()

    def _of_all(self, bad: Tensor, norms: Tensor) -> Tensor:
        """The numbers of ranks with a bad loss and with a wish, and the gradients' norms, the same on all."""
        if self._num_ranks == 1:
            return torch.cat([bad, norms])
        if not self._is_sharded:  # the norms are of the mean over all ranks
            dist.all_reduce(bad)
            return torch.cat([bad, norms])
        values = torch.cat([bad, norms.square()])
        dist.all_reduce(values)
        return torch.cat([values[:2], values[2:].sqrt()])

    def settle(self) -> None:
        """Raise if the step seen last was not sound; waits for that step only."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if pending.event is not None:
            pending.event.synchronize()
        bad, losses = pending.values[0], pending.values[2 : 2 + len(pending.seen)]
        norms = pending.values[2 + len(pending.seen) :]
        self._others_asked = self._others_asked or bool(pending.values[1])
        if bad or not losses.isfinite().all():
            mine = "" if losses.isfinite().all() else self._bad_loss(pending, losses)
            raise TrainingStopped(next(text for text in self._exchange(mine) if text))
        if pending.scaled or (norms.any() and norms.isfinite().all()):
            self._first = self._first or (pending.step, float(losses.sum()))
            return
        raise TrainingStopped(self._bad_gradients(pending, norms))

    def asked_to_stop(self) -> bool:
        """Whether the run is to end behind this step: with several ranks the same on all of them."""
        return self._others_asked if self._num_ranks > 1 else self._asked()

    def _bad_gradients(self, pending: _Pending, norms: Tensor) -> str:
        mine = [group for _, rows in pending.seen for group in rows]
        rows = numbers_of([group for groups in self._exchange(mine) for group in groups])
        if not norms.any():
            return (
                f"all gradients are zero at step {pending.step} ({len(norms)} parameters with a gradient), so"
                f" nothing would be learned from rows {rows}; {self._why_zero(pending)}"
            )
        bad = pending.trained[int((~norms.isfinite()).nonzero()[0])]
        name = next((name for name, p in self._model.named_parameters() if p is bad), "a parameter")
        return (
            f"the gradient of {name} is not finite at step {pending.step} on rows {rows} of the training"
            " data; no weight was changed by it: lower the learning rate, or resume from the last"
            " checkpoint."
        )

    def _why_zero(self, pending: _Pending) -> str:
        """The probable cause, and what to do: gradients vanish where nothing is left, or all is lost."""
        loss = float(pending.values[2 : 2 + len(pending.seen)].sum())
        layers = "check that the trained layers are part of the forward pass."
        if self._first is None:
            if pending.step == 1:
                return layers
            return (
                f"either the training had diverged before the checkpoint that it went on from (the loss is"
                f" {loss:.4g}): begin anew with a lower learning rate; or {layers}"
            )
        step, before = self._first
        if loss < before:
            return (
                f"the loss has fallen from {before:.4g} at step {step} to {loss:.4g}, so nothing may be left"
                " to learn here: end the run earlier (max_steps, early_stopping_patience)."
            )
        return (
            f"the training has probably diverged, for the loss has risen from {before:.4g} at step {step} to"
            f" {loss:.4g}: lower the learning rate (or max_grad_norm), and begin anew or from an early"
            " checkpoint."
        )

    def _bad_loss(self, pending: _Pending, losses: Tensor) -> str:
        first = int((~losses.isfinite()).nonzero()[0])
        return (
            f"the loss became {float(losses[first])} at step {pending.step} on rows"
            f" {numbers_of(pending.seen[first][1])} of the training data{_first_bad_weight(self._model)}; no"
            " weight was changed by it: look at these rows, lower the learning rate, or resume from the last"
            " checkpoint."
        )


def inner_optimizer(optimizer: Optimizer) -> Any:
    """The optimizer of torch inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def can_skip(optimizer: Optimizer) -> bool:
    """Whether the optimizer skips a step whose ``found_inf`` is set."""
    return bool(getattr(inner_optimizer(optimizer), "_step_supports_amp_scaling", False))


def _local(gradient: Tensor) -> Tensor:
    """This rank's part of a sharded gradient."""
    part: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return part


def _to_host(values: Tensor) -> tuple[Tensor, Any]:
    """A copy on the host, and the event of its end; None: it is there."""
    if values.device.type != "cuda":
        return values, None
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(values.device))
    return host, event


def _first_bad_weight(model: nn.Module) -> str:
    for name, p in model.named_parameters():
        if p.is_floating_point() and not p.isfinite().all():
            return f", and {name} already holds a number that is not finite"
    return ""


def numbers_of(rows: list[list[int]]) -> str:
    """The numbers of rows, at most eight of them."""
    flat = sorted({number for group in rows for number in group})
    text = ", ".join(map(str, flat[:8]))
    return f"{text} and {len(flat) - 8} more" if len(flat) > 8 else text or "unknown"
