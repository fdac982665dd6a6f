"""Graphs, with one that replays by calling: same numbers, same memory, and reasons where there is none."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fewbits.training.step.graph import GraphedStep, wants_graph


class CallingBackend:
    """A capture does not run and a replay runs, on the tensors that were there at the capture.

    With ``parameters`` their gradients are those of the capture: a graph that found none makes them in
    memory of its own (the loss's gradient is one, so a backward pass of NaN shows what is not written), and
    each replay works on what was there then, whatever the parameters hold now.
    """

    def __init__(self, fail: str | None = None, parameters=()) -> None:
        self.pool, self.fail, self.captures, self.broken = None, fail, 0, 0
        self.parameters = [p for p in parameters if p.requires_grad]

    def beside(self, work):
        return work()

    def capture(self, work):
        self.captures += 1
        if self.fail is not None:
            raise RuntimeError(self.fail)
        loss = torch.full((), float("nan"))
        found = [p.grad for p in self.parameters]
        made = self._made(work, found)

        def replay():
            now = [p.grad for p in self.parameters]
            for p, grad, of_graph in zip(self.parameters, found, made, strict=True):
                p.grad = grad
                if grad is None and of_graph is not None:
                    of_graph.fill_(float("nan"))  # the graph's memory: anything may have been there
            loss.copy_(work())
            for p, of_graph, before in zip(self.parameters, made, now, strict=True):
                if of_graph is not None and p.grad is not of_graph:
                    of_graph.copy_(p.grad)
                p.grad = before

        return replay, loss

    def _made(self, work, found):
        """The gradients that a capture leaves behind: it runs the host's part, and no value changes."""
        values = [(t, t.clone()) for t in (*self.parameters, *(g for g in found if g is not None))]
        random = torch.get_rng_state()
        if self.parameters:
            work()
        made = [p.grad for p in self.parameters]
        torch.set_rng_state(random)
        with torch.no_grad():
            for tensor, value in values:
                tensor.copy_(value)
            for grad, before in zip(made, found, strict=True):
                if grad is not None and before is None:
                    grad.fill_(float("nan"))
        return made

    def failed(self):
        self.broken += 1


def make(seed=0):
    torch.manual_seed(seed)
    return nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(2, 2)})


def drop(*models):
    for model in models:
        for p in model.parameters():
            p.grad = None


def one_pass(model):
    def step(batch, num_items):
        loss = model["used"](batch["x"]).square().sum() / (num_items if num_items is not None else 1)
        if batch.get("scale"):
            loss = loss * batch["scale"]
        loss.backward()
        return loss.detach()

    return step


def graphed(model, **options):
    of_graph = () if "optimizer" in options else model.parameters()  # an optimizer inside drops them
    backend = options.pop("backend", CallingBackend(parameters=of_graph))
    return GraphedStep(one_pass(model), model.parameters(), backend=backend, **options), backend


@pytest.mark.parametrize("accumulated", [1, 3])
def test_training_is_the_same_with_and_without(accumulated):
    one, two = make(), make()
    step, backend = graphed(two)
    plain = one_pass(one)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (one, two)]
    for _ in range(5):
        for _ in range(accumulated):
            batch, items = {"x": torch.randn(4, 3)}, torch.tensor(float(torch.randint(1, 9, ())))
            losses = plain(dict(batch), items), step(batch, items)
            assert torch.equal(*losses)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    # one graph that writes gradients, one that adds; with several passes both wait for a step's first
    assert backend.captures == min(accumulated, 2)
    assert step.replays == 5 * accumulated - (2 if accumulated == 1 else 3)
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(p, q)
    assert two["unused"].weight.grad is None, "what gets no gradient gets none from a graph"


@pytest.mark.gpu
@pytest.mark.parametrize("accumulated", [1, 3])
def test_training_is_the_same_with_cuda_graphs(accumulated):
    one, two = make().cuda(), make().cuda()
    step, plain = GraphedStep(one_pass(two), two.parameters()), one_pass(one)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, fused=True) for m in (one, two)]
    for n in range(6):
        for k in range(accumulated):
            rows = 5 if (n, k) in ((3, 0), (4, 2)) else 4  # another shape, which never gets a graph
            batch = {"x": torch.randn(rows, 3, device="cuda")}
            losses = plain(dict(batch), None), step(batch)
            torch.testing.assert_close(*losses)
        for p, q in zip(one.parameters(), two.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            torch.testing.assert_close(p.grad, q.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    other_shapes = 1 if accumulated == 1 else 2
    assert step.replays == 6 * accumulated - other_shapes - (2 if accumulated == 1 else 3), str(step)
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_the_first_pass_of_a_step_writes_gradients_and_adds_to_nothing():
    model = make()
    step, backend = graphed(model)
    weight, held = model["used"].weight, []
    for n in range(6):
        step({"x": torch.full((1, 3), float(n))})
        held.append(weight.grad)
        if n >= 3:
            held[-1].mul_(1000)  # as clipping may; the next replay writes over it
        drop(model)
    assert backend.captures == 1 and all(grad is held[2] for grad in held[2:]), "one memory for all replays"
    plain = make()
    one_pass(plain)({"x": torch.full((1, 3), 5.0)}, None)
    assert torch.equal(held[-1], plain["used"].weight.grad * 1000)


def test_gradients_that_are_zero_and_not_dropped_are_added_to():
    """optimizer.zero_grad(set_to_none=False): no pass of a step begins without gradients."""
    model, other = make(), make()
    step, backend = graphed(model)
    for n in range(80):
        for m in (model, other):
            for p in m.parameters():
                if p.grad is not None:
                    p.grad.zero_()
        x = torch.randn(2, 3)
        step({"x": x}), one_pass(other)({"x": x}, None)
        assert torch.equal(model["used"].weight.grad, other["used"].weight.grad), n
    assert backend.captures == 1 and step.replays == 16


def test_another_shape_adds_to_the_same_gradients():
    model, other = make(), make()
    step, backend = graphed(model)
    for n in range(12):
        drop(model, other)
        for x in (torch.randn(2, 3), torch.randn(3 + n % 2, 3)):
            step({"x": x}), one_pass(other)({"x": x}, None)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert p.grad is q.grad is None or torch.equal(p.grad, q.grad), n
    assert backend.captures == 3 and step.replays > 12


def test_losses_of_earlier_passes_stay():
    step, _ = graphed(make())
    losses = [step({"x": torch.randn(4, 3)}) for _ in range(5)]
    assert len({loss.data_ptr() for loss in losses}) == 5 and len({float(loss) for loss in losses}) == 5


def test_each_shape_and_each_setting_has_its_graph_up_to_a_number():
    model = make()
    step, backend = graphed(model)
    for rows in (2, 3, 4, 5, 6):
        for _ in range(4):
            step({"x": torch.randn(rows, 3), "scale": 2.0})
            drop(model)
    assert backend.captures == 4 and step.reasons["there are graphs of 4 other shapes"] == 4
    step.reset()
    for scale in (2.0, 3.0):
        for _ in range(3):
            step({"x": torch.ones(2, 3), "scale": scale})
            drop(model)
    assert backend.captures == 6
    assert "passes were replays of a CUDA graph; the others ran as usual: warming up" in str(step)


def test_gradients_of_eager_and_replayed_passes_add_up():
    model, other = make(), make()
    step, _ = graphed(model)
    for _ in range(2):
        step({"x": torch.randn(4, 3)})
        drop(model)
    batches = [torch.randn(4, 3) for _ in range(4)] + [torch.randn(1, 3), torch.randn(4, 3)]
    for x in batches:
        step({"x": x})
        one_pass(other)({"x": x}, None)
    assert step.replays == 5
    torch.testing.assert_close(model["used"].weight.grad, other["used"].weight.grad, rtol=0, atol=0)


@pytest.mark.parametrize("fused", [True, False])
def test_an_optimizer_inside_follows_its_learning_rate(fused):
    one, two = make(), make()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, fused=fused) for m in (one, two)]
    step, backend = graphed(two, optimizer=optimizers[1])
    plain = one_pass(one)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda n: 0.5**n) for o in optimizers]
    for _ in range(6):
        batch = {"x": torch.randn(4, 3)}
        plain(dict(batch), None)
        optimizers[0].step()
        optimizers[0].zero_grad()
        step(batch)
        for schedule in schedules:
            schedule.step()
    assert backend.captures == 1
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_a_pass_that_is_not_finite_updates_nothing():
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    step, _ = graphed(model, optimizer=optimizer)
    for x in (torch.randn(2, 3), torch.randn(2, 3), torch.randn(2, 3)):
        step({"x": x})
    before = copy.deepcopy(model.state_dict())
    step({"x": torch.full((2, 3), float("nan"))})
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_why_there_is_no_graph():
    model = make()
    plain = GraphedStep(one_pass(model), model.parameters())
    plain({"x": torch.randn(2, 3)})
    assert plain.reasons == {"the model is on a cpu": 1}
    step, backend = graphed(
        model, backend=CallingBackend("operation not permitted when stream is capturing\nx")
    )
    for _ in range(4):
        step({"x": torch.randn(2, 3)})
        drop(model)
    assert backend.captures == backend.broken == 1 and step.replays == 0
    assert step.reasons["capturing failed: operation not permitted when stream is capturing"] == 2
    step, backend = graphed(model, refuse=lambda: "inputs go to the host")
    for _ in range(4):
        step({"x": torch.randn(2, 3)})
    assert backend.captures == 0 and step.reasons == {"inputs go to the host": 4}
    step, _ = graphed(model)
    step({"x": torch.randn(2, 3), "rows": [1]})
    assert step.reasons == {"the batch holds rows, which is no tensor": 1}
    step, _ = graphed(model, optimizer=torch.optim.SparseAdam(model.parameters()))
    step._given_up = step._never()
    assert step._given_up == "SparseAdam cannot be captured"


def test_the_rule_of_auto():
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert wants_graph("auto", device=cuda, hidden_size=1024, fixed_shapes=True)
    assert not wants_graph("auto", device=cuda, hidden_size=4096, fixed_shapes=True)
    assert not wants_graph("auto", device=cuda, hidden_size=1024, fixed_shapes=False)
    assert not wants_graph("auto", device=cpu, hidden_size=1024, fixed_shapes=True)
    assert wants_graph("true", device=cpu, hidden_size=8192, fixed_shapes=False)
    assert not wants_graph("false", device=cuda, hidden_size=64, fixed_shapes=True)
