"""A training step as one CUDA graph: the host launches a replay instead of thousands of kernels.

It pays where a step is launch-bound, that is where the device waits for the host: small models. A graph
repeats the very same work on the very same memory, so batches are copied into buffers of one shape, and
gradients come into buffers of their own; everything else (another shape, a plan that offloads, work that a
graph cannot hold) runs as usual, and `GraphedStep.reasons` counts why.

The first pass of a step, which finds no gradients, has a graph of its own that writes them: nothing is set to
zero and nothing added, 8 bytes less to move for each bfloat16 value that trains. A second graph of the same
shape adds to the same gradients, for the step's further passes; it is captured when there is such a pass.

The first passes of a shape run eagerly on the stream that captures later: kernels are compiled, workspaces
found, and these passes are real ones, so nothing is computed in vain and no weight is touched twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.models.plan.memory_ends import first_sentence
from fewbits.training.data.collator import Batch
from fewbits.training.plan.out_of_memory import Pass
from fewbits.training.step.bad_numbers import can_skip, inner_optimizer

# Up to this width of the residual, layers of a few thousand tokens end before the host has launched the next.
# On an H200, NF4 with LoRA, 4 x 2048 tokens: width 1024 (0.6B) takes 138.6 ms eagerly, 66.1 replayed; width
# 2048 (1.7B) 133.0 and 131.1; wider models wait for the device.
LAUNCH_BOUND_WIDTH = 2048
_WARM_UP, _MAX_GRAPHS = 2, 4
_PATIENCE = 64  # passes to wait for the first one of a step, whose graph comes first
_ITEMS = "num_items"  # the step's token count, as one more input


class CudaBackend:
    """Streams and graphs of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pool: Any = None

    def beside(self, work: Callable[[], Tensor]) -> Tensor:
        """Run on the stream that captures later; what it gives has any shape."""
        here = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            result = work()
        here.wait_stream(self.stream)
        return result

    def capture(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Record without running: what replays it, and where its result will be."""
        graph = torch.cuda.CUDAGraph()
        here = torch.cuda.current_stream(self.device)
        try:
            # Threads of the data loader may allocate pinned memory meanwhile.
            with torch.cuda.graph(
                graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
            ):
                result = work()
        finally:
            torch.cuda.set_stream(here)  # torch leaves its own stream behind when a capture breaks off
        self.pool = graph.pool()
        return graph.replay, result

    def failed(self) -> None:
        """After a capture that broke off: torch's random generator believes in it until another one ends."""
        torch.cuda.synchronize(self.device)
        empty = torch.cuda.CUDAGraph()
        one = torch.zeros((), device=self.device, dtype=torch.float32)
        with torch.cuda.graph(empty, stream=self.stream, capture_error_mode="thread_local"):
            one.add_(1)
        torch.cuda.empty_cache()


@dataclass
class _Graph:
    """A captured pass; ``writes``: which parameters' gradients it writes, None if it adds to them."""

    inputs: dict[str, Tensor]
    replay: Callable[[], None]
    loss: Tensor
    writes: list[int] | None


class GraphedStep:
    """Calls a pass as a graph where it can, and as it is where it cannot.

    Attributes:
        replays: passes that were replayed.
        reasons: why passes ran eagerly, counted.
    """

    def __init__(
        self,
        step: Pass,
        parameters: Iterable[nn.Parameter],
        *,
        optimizer: Any = None,
        refuse: Callable[[], str | None] = lambda: None,
        backend: Any = None,
    ) -> None:
        """Nothing is captured yet.

        Args:
            step: one forward and backward pass, from the batch and the step's token count to the loss. It
                adds to the parameters' ``.grad`` and waits for nothing.
            parameters: those that may train, all on one device.
            optimizer: steps after each pass and drops the gradients, within the graph if it can be captured
                (``capturable`` in its groups); its learning rates become tensors, which schedulers fill. A
                pass that is not finite changes nothing if the optimizer is a fused one.
            refuse: a reason not to capture now, such as a plan that offloads.
            backend: streams and graphs; None: those of the parameters' device.
        """
        self._step, self._refuse = step, refuse
        self._parameters = [p for p in parameters if p.requires_grad]
        self._optimizer = inner_optimizer(optimizer)
        device = self._parameters[0].device if self._parameters else torch.device("cpu")
        self._device, self._backend = device, backend
        if backend is None and device.type == "cuda":
            self._backend = CudaBackend(device)
        self._given_up = self._never()
        self._rates: list[Tensor] = []
        self._seen: Counter[Hashable] = Counter()
        self._used: set[int] = set()
        self._gradients: dict[int, Tensor] = {}
        self._graphs: dict[Hashable, dict[bool, _Graph]] = {}  # by shape: the one that writes, that adds
        self.replays, self.reasons = 0, Counter[str]()

    def __call__(self, batch: Batch, num_items: Any = None) -> Tensor:
        """The loss, () on the device; gradients are added to, or with an optimizer weights are updated."""
        if self._given_up is None:  # a bound of its own would want a graph of its own
            batch = {name: value for name, value in batch.items() if name != "valid_rows"}
        inputs, key, reason = self._sort(batch, num_items)
        if self._optimizer is not None:
            self._keep_rates()
        if reason is None:
            adds = self._adds(key)
            if self._is_time(key, adds):
                self._try_to_capture(key, adds, inputs, batch)
            graph = self._graphs.get(key, {}).get(adds)
            if graph is not None:
                return self._replay(graph, inputs)
            reason = self._given_up
        self.reasons[reason or "warming up"] += 1
        if reason is not None:
            return self._eager(batch, num_items)
        loss: Tensor = self._backend.beside(lambda: self._eager(batch, num_items))
        self._seen[key] += 1
        self._used |= {i for i, p in enumerate(self._parameters) if p.grad is not None}
        return loss

    def reset(self) -> None:
        """Forget what was captured: the model computes in another way from now on."""
        self._graphs.clear()
        self._seen.clear()
        self._gradients.clear()
        self._given_up = self._never()
        if self._backend is not None:
            self._backend.pool = None

    def __str__(self) -> str:
        """One line for the record."""
        eager = self.reasons.total()
        text = f"{self.replays} of {self.replays + eager} passes were replays of a CUDA graph"
        why = ", ".join(f"{reason} ({n})" for reason, n in self.reasons.most_common())
        return f"{text}; the others ran as usual: {why}" if why else text

    def _never(self) -> str | None:
        if self._backend is None:
            return f"the model is on a {self._device.type}" if self._parameters else "nothing trains"
        if any(p.device != self._device for p in self._parameters):
            return "the model is on several devices"
        if self._optimizer is not None and "capturable" not in self._optimizer.defaults:
            return f"{type(self._optimizer).__name__} cannot be captured"
        return None

    def _sort(self, batch: Batch, num_items: Any) -> tuple[dict[str, Tensor], Hashable, str | None]:
        """The tensors of a batch, the key of its graph, and why it can have none."""
        tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
        rest = {name: value for name, value in batch.items() if name not in tensors}
        if isinstance(num_items, Tensor):
            tensors[_ITEMS] = num_items
        elif num_items is not None:
            tensors[_ITEMS] = torch.tensor(num_items)
        shapes = tuple((name, tuple(t.shape), t.dtype) for name, t in sorted(tensors.items()))
        unhashable = [name for name, value in rest.items() if not isinstance(value, Hashable)]
        if unhashable:
            return tensors, None, f"the batch holds {unhashable[0]}, which is no tensor"
        key = (shapes, tuple(sorted(rest.items())))
        reason = self._given_up or self._refuse()
        if reason is None and key not in self._graphs and len(self._graphs) >= _MAX_GRAPHS:
            reason = f"there are graphs of {_MAX_GRAPHS} other shapes"
        return tensors, key, reason

    def _eager(self, batch: Batch, num_items: Any) -> Tensor:
        loss = self._step(dict(batch), num_items)
        if self._optimizer is not None:
            self._update(loss)
        return loss

    def _update(self, loss: Tensor) -> None:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if can_skip(self._optimizer):
            norms = torch.stack([norm.float() for norm in torch._foreach_norm(gradients)])
            self._optimizer.found_inf = (~(norms.isfinite().all() & loss.isfinite())).float()
        self._optimizer.step()
        for p in self._parameters:
            p.grad = None

    def _adds(self, key: Hashable) -> bool:
        """Whether this pass adds to gradients: there are some, or another shape's graph has their memory."""
        if any(p.grad is not None for p in self._parameters):
            return True
        return bool(self._gradients) and False not in self._graphs.get(key, {})

    def _is_time(self, key: Hashable, adds: bool) -> bool:
        """Whether to capture: the shape has been seen, and the graph that adds is not the first one."""
        if adds in self._graphs.get(key, {}) or self._seen[key] < _WARM_UP:
            return False
        if adds and self._optimizer is not None:
            return False  # gradients of somebody else's, once: the optimizer drops them
        return not adds or bool(self._gradients) or self._seen[key] >= _PATIENCE

    def _try_to_capture(self, key: Hashable, adds: bool, inputs: dict[str, Tensor], batch: Batch) -> None:
        static = {name: torch.empty_like(t, device=self._device) for name, t in inputs.items()}
        for name, t in inputs.items():
            static[name].copy_(t, non_blocking=True)
        repeated: Batch = {**batch, **{name: t for name, t in static.items() if name != _ITEMS}}
        if adds:
            self._attach()
        try:
            replay, loss = self._backend.capture(lambda: self._eager(repeated, static.get(_ITEMS)))
        except RuntimeError as error:
            if not adds:  # what has come into the graph's memory is no gradient
                for p in self._parameters:
                    p.grad = None
            self._backend.failed()
            self._given_up = f"capturing failed: {first_sentence(error)}"
            return
        writes = None
        if not adds:
            self._gradients = {i: p.grad for i, p in enumerate(self._parameters) if p.grad is not None}
            writes = list(self._gradients)
        self._graphs.setdefault(key, {})[adds] = _Graph(static, replay, loss, writes)

    def _replay(self, graph: _Graph, inputs: dict[str, Tensor]) -> Tensor:
        if graph.writes is None:
            self._attach()
        for name, t in inputs.items():
            graph.inputs[name].copy_(t, non_blocking=True)
        graph.replay()
        for i in graph.writes or ():
            self._parameters[i].grad = self._gradients[i]
        self.replays += 1
        return graph.loss.clone()

    def _attach(self) -> None:
        """Give each parameter the gradient that graphs add to, with what has been summed up so far."""
        clear = []
        for i in sorted(self._used):
            p = self._parameters[i]
            if i not in self._gradients:
                self._gradients[i] = torch.zeros_like(p) if p.grad is None else p.grad
            elif p.grad is None:
                clear.append(self._gradients[i])
            elif p.grad is not self._gradients[i]:
                self._gradients[i].copy_(p.grad)
            p.grad = self._gradients[i]
        if clear:
            torch._foreach_zero_(clear)

    def _keep_rates(self) -> None:
        """Learning rates are tensors that a graph reads; who sets a number sets the tensor's value."""
        groups = self._optimizer.param_groups
        if not self._rates and self._given_up is None:
            for group in groups:
                rate = group["lr"]
                self._rates.append(torch.as_tensor(rate, dtype=torch.float32).to(self._device).clone())
                group["capturable"] = self._device.type == "cuda"  # torch knows no other here
            for state in self._optimizer.state.values():
                if isinstance(state.get("step"), Tensor):
                    state["step"] = state["step"].to(self._device)
        for group, rate in zip(groups, self._rates, strict=False):
            if group["lr"] is not rate:
                rate.fill_(group["lr"]) if not isinstance(group["lr"], Tensor) else rate.copy_(group["lr"])
                group["lr"] = rate


def wants_graph(choice: str, *, device: torch.device, hidden_size: int, fixed_shapes: bool) -> bool:
    """Whether a run should try graphs.

    Args:
        choice: "true", "false", or "auto": on a CUDA device, for models up to `LAUNCH_BOUND_WIDTH`, where all
            batches have one shape.
        device: the model's.
        hidden_size: the residual's width.
        fixed_shapes: whether batches have one shape without more padding than they have anyway.
    """
    if choice != "auto":
        return choice == "true"
    return device.type == "cuda" and hidden_size <= LAUNCH_BOUND_WIDTH and fixed_shapes
