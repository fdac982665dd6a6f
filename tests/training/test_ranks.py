"""What ranks tell each other, who is found dead, how a step is dealt out, which way of sharing is chosen."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch
from torch.distributed import HashStore

from fewbits.errors import BadInput, PeerLost, SpecMismatch, TrainingStopped
from fewbits.recipes import get_recipe
from fewbits.training.data.step_sampler import EpochSampler, StepBatches
from fewbits.training.plan.parallel import choose, data_share, need_of
from fewbits.training.ranks.averaging import GradientMean
from fewbits.training.ranks.neighbours import Place
from fewbits.training.ranks.processes import Ranks, is_broken_connection
from fewbits.training.ranks.watch import Pace, Watch
from fewbits.training.step.bad_numbers import NumberCheck


class Store:
    """A store in this process, which several threads take for one between processes."""

    def __init__(self, inner=None):
        self.inner = inner or HashStore()
        self.broken = False

    def clone(self):
        return self

    def __getattr__(self, name):
        if self.broken:
            raise RuntimeError("Connection reset by peer")
        return getattr(self.inner, name)

    def compare_set(self, key, expected, desired):  # a HashStore has another idea of what is not there
        if not self.inner.check([key]):
            self.inner.set(key, desired)
        return self.inner.get(key)


def together(size, work, **options):
    """``work(ranks)`` on threads that take themselves for ranks; results or errors, by rank."""
    store, found = Store(), [None] * size

    def run(rank):
        try:
            found[rank] = work(Ranks(rank, size, store=store, **options))
        except Exception as error:  # noqa: BLE001 - looked at by the test
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_everyone_hears_everyone():
    def work(ranks):
        return ranks.exchange("a", ranks.rank), ranks.exchange("a", {"n": [ranks.rank] * 2})

    assert together(3, work) == [([0, 1, 2], [{"n": [i, i]} for i in range(3)])] * 3


def test_the_leader_works_and_all_have_the_result_or_the_refusal():
    assert together(3, lambda ranks: ranks.led("a", lambda: ranks.rank + 5)) == [5, 5, 5]

    def refuse(ranks):
        def work():
            raise BadInput("no; do otherwise.")

        return ranks.led("a", work)

    found = together(3, refuse)
    assert [type(error) for error in found] == [BadInput] * 3 and {str(e) for e in found} == {
        "no; do otherwise."
    }


def test_what_differs_is_named_with_rank_and_values():
    def work(ranks):
        ranks.check_same({"seed": 1, "lr": 0.5 if ranks.rank == 2 else 0.25, "paths": [1]})

    for error in together(3, work):
        assert isinstance(error, SpecMismatch)
        assert "lr differs between the ranks: rank 0 (on " in str(error)
        assert "has 0.25, rank 2 (on " in str(error) and "has 0.5;" in str(error)
    assert together(2, lambda ranks: ranks.check_same({"a": (1, 2)})) == [None, None]


def test_a_rank_that_says_nothing_is_named():
    def work(ranks):
        if ranks.rank == 0:
            ranks.exchange("settings", 1)

    class Impatient(HashStore):
        def wait(self, keys, timeout):
            try:
                super().wait(keys, timeout)
            except RuntimeError as error:
                raise torch.distributed.DistStoreError("wait timeout") from error

    store = Store(Impatient())
    with pytest.raises(PeerLost, match=r"rank 0 of 2 .* has waited 0.2 s for rank 1 \(settings\) in vain"):
        Ranks(0, 2, store=store, wait_seconds=0.2).exchange("settings", 1)


QUICK = Pace(period_s=0.02, silence_s=0.4)


def watching(rank, store, size=2, pace=QUICK):
    """A watch whose end is written down instead of ending pytest."""
    ended = []
    watch = Watch(Ranks(rank, size, store=store), pace=pace, end=ended.append, told=ended.append)
    return watch, ended


def until(condition):
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def test_a_silent_neighbour_is_found_and_told_to_all():
    store = Store()
    watch, ended = watching(0, store)
    with watch:
        store.set("beat/1", "7")
        until(lambda: ended)
    assert len(ended) == 2 and ended[0] == ended[1]
    assert ended[0].startswith("rank 1 of 2 has given no sign of life for 0.4 s")
    assert store.get("failed").decode() == ended[0]


def neighbour(store, code):
    """A process of this machine, which the store takes for rank 1."""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    began = psutil.Process(process.pid).create_time()
    store.set("place/1", json.dumps({**Place.here().as_dict(), "pid": process.pid, "began": began}))
    return process


def test_a_neighbour_whose_process_is_gone_is_found_without_silence():
    store = Store()
    process = neighbour(store, "import os; os.kill(os.getpid(), 9)")
    watch, ended = watching(0, store, pace=Pace(period_s=0.02, silence_s=600))
    with watch:
        until(lambda: ended)
    process.wait()
    assert re.match(rf"rank 1 of 2 \(process {process.pid} on .+\) is gone, and has not said why; ", ended[0])


def test_a_stopped_neighbour_is_named_and_may_go_on():
    store = Store()
    process = neighbour(store, "input()")
    watch, ended = watching(0, store, pace=Pace(period_s=0.02, silence_s=600, stopped_s=0.5))
    with watch:
        time.sleep(0.3)
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.2)
        process.send_signal(signal.SIGCONT)
        time.sleep(0.6)
        assert not ended
        process.send_signal(signal.SIGSTOP)
        until(lambda: ended)
    process.kill()
    process.wait()
    assert re.match(rf"rank 1 of 2 \(process {process.pid} on .+\) has been stopped for [01] s; ", ended[0])


def test_a_neighbour_of_another_machine_is_not_looked_for():
    here = Place.here()
    assert Place(2**22 + 1, here.began, here.machine).fate() == "gone"
    assert Place(here.pid, here.began - 100, here.machine).fate() == "gone"  # its number came again
    assert Place(2**22 + 1, here.began, "another kernel").fate() == "" == here.fate()


def test_a_rank_without_its_launcher_ends_and_says_so_to_all():
    store = Store()
    first, ended = watching(0, store)
    second, others = watching(1, store)
    first._launcher = -1  # whoever started this process has another number
    with first, second:
        until(lambda: ended and others)
    assert ended[0] == others[0]
    assert ended[0].startswith("the launcher of rank 0 of 2 (on ") and "(process -1) is gone" in ended[0]


def test_a_neighbour_that_has_left_is_no_dead_one():
    store = Store()
    watch, ended = watching(0, store)
    with watch:
        store.set("beat/1", "left")
        time.sleep(3 * QUICK.silence_s)
    assert not ended and store.get("beat/0") == b"left"


def test_the_first_failure_is_everybodys_sentence():
    store = Store()
    watch, ended = watching(0, store)
    other, _ = watching(1, store)
    with watch:
        with pytest.raises(TrainingStopped), other:
            raise TrainingStopped("the loss became nan.")
        until(lambda: ended)
    assert ended[0].startswith("rank 1 of 2 (on ") and ended[0].endswith("stopped: the loss became nan.")


def test_a_lost_store_is_told_once_the_patience_ends():
    store = Store()
    watch, ended = watching(0, store)
    with watch:
        store.broken = True
        until(lambda: ended)
    assert "cannot reach the store of the first machine any more" in ended[0]


def test_a_broken_collective_gets_the_sentence_of_who_is_to_blame():
    store = Store()
    store.set("failed", "rank 1 of 2 stopped: it was tired.")
    watch, _ = watching(1, store, pace=Pace(period_s=5, silence_s=60))
    with pytest.raises(PeerLost, match="rank 1 of 2 stopped: it was tired"), watch:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1")
    assert not is_broken_connection(RuntimeError("shapes do not match"))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("count, batch_size, accumulation", [(40, 4, 2), (41, 3, 3), (7, 8, 1), (100, 2, 5)])
def test_all_ranks_together_take_each_step_of_one_process(size, count, batch_size, accumulation):
    per_step = batch_size * accumulation
    order = EpochSampler(count, 3)
    order.set_epoch(2)
    dealt = [
        StepBatches(order, per_step=per_step, batch_size=batch_size, rank=rank, size=size)
        for rank in range(size)
    ]
    passes = [list(batches) for batches in dealt]
    assert {len(batches) for batches in dealt} == {len(rank) for rank in passes} == {len(passes[0])}
    steps = -(-count // per_step)
    number = dealt[0].passes
    assert -(-len(passes[0]) // number) == steps == dealt[0].num_steps
    for step in range(steps):
        taken = [
            rank[i] for i in range(step * number, min((step + 1) * number, len(passes[0]))) for rank in passes
        ]
        assert max(len(part) for part in taken) <= batch_size
        real = [i for part in taken for i in part if i >= 0]
        assert real == order.order(2)[step * per_step : (step + 1) * per_step] == dealt[0].of_step(step)
        assert all(len(part) == 1 for part in taken if part[0] < 0)


def test_a_piece_has_its_random_numbers_wherever_it_is_computed():
    order = EpochSampler(64, 3)
    seeds = {}
    for size in (1, 2, 4):
        for rank in range(size):
            batches = StepBatches(order, per_step=8, batch_size=2, rank=rank, size=size)
            for number in range(batches.passes):
                seeds.setdefault(number * size + rank, set()).add(batches.seed_of(5, number))
    assert [len(found) for found in seeds.values()] == [1] * 4
    assert len({seed for found in seeds.values() for seed in found}) == 4


def test_a_step_smaller_than_the_ranks_is_refused():
    with pytest.raises(BadInput, match=r"one step has 3 sequences .* too few for 4 ranks"):
        StepBatches(EpochSampler(9, 0), per_step=3, batch_size=3, size=4)


LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}


def test_auto_chooses_by_predicted_bytes():
    qlora = get_recipe("qlora_nf4")
    gib = 2**30

    def kind(model, free_gib, recipe=qlora, lora=qlora.lora, size=2, asked="auto"):
        need = need_of(model, recipe, lora, (4, 2048), "adamw")
        available = None if free_gib is None else int(free_gib * gib)
        return choose(asked, size=size, available=available, need=need)

    chosen, why = kind(LLAMA_8B, 140)
    assert chosen == "ddp" and "predicted to take" in why and "140" not in why and "135.8 GiB" in why
    chosen, why = kind(LLAMA_70B, 40, size=4)
    assert chosen == "fsdp" and "may still be too much" not in why
    assert kind(LLAMA_8B, 140, None, None)[0] == "fsdp" or kind(LLAMA_8B, 80, None, None)[0] == "fsdp"
    assert kind(LLAMA_8B, 20, None, None)[1].endswith("which may still be too much")
    assert kind(LLAMA_70B, None)[0] == "ddp" and kind(LLAMA_70B, 40, size=1)[0] == "one"
    assert kind(LLAMA_70B, 40, asked="ddp") == ("ddp", "as configured")
    assert "cannot be predicted" in kind({}, 40)[1]


def test_ranks_of_one_layer_see_the_same_data():
    assert [data_share("tensor", rank=r, size=4, tensor_size=2) for r in range(4)] == [
        (0, 2),
        (0, 2),
        (1, 2),
        (1, 2),
    ]
    assert data_share("tensor", rank=3, size=4, tensor_size=None) == (0, 1)
    assert data_share("fsdp", rank=3, size=4, tensor_size=None) == (3, 4)
    with pytest.raises(BadInput, match="tensor_size is 3, which does not divide the 4 ranks"):
        data_share("fsdp", rank=0, size=4, tensor_size=3)
    with pytest.raises(BadInput, match="but parallel is ddp"):
        data_share("ddp", rank=0, size=4, tensor_size=2)


def test_gradients_of_many_kinds_become_their_mean(monkeypatch):
    monkeypatch.setattr("fewbits.training.ranks.averaging._BUCKET_BYTES", 40)
    seen = []

    def all_reduce(flat, group=None):
        seen.append(flat.numel())
        flat *= 3  # two other ranks with the same gradients, so that the mean is what it was

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    shapes = [(3, 2), (5,), (), (20,)]
    parameters = [torch.nn.Parameter(torch.zeros(s, dtype=torch.float32)) for s in shapes]
    parameters.append(torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16)))
    frozen = torch.nn.Parameter(torch.zeros(9), requires_grad=False)
    want = [torch.randn_like(p) for p in parameters]
    for p, g in zip(parameters[1:], want[1:], strict=True):
        p.grad = g.clone()
    kept = [p.grad for p in parameters]
    GradientMean([*parameters, frozen], 3)()
    assert torch.equal(parameters[0].grad, torch.zeros(3, 2)) and frozen.grad is None
    for p, g, same in zip(parameters[1:], want[1:], kept[1:], strict=True):
        assert p.grad is same  # a graph's gradients stay where they are
        torch.testing.assert_close(p.grad, g)
    assert seen == [6, 6, 20, 4]


def test_a_bad_loss_of_another_rank_stops_this_one_with_its_sentence(monkeypatch):
    model = torch.nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda value: value.add_(1))
    check = NumberCheck(model, num_ranks=2, exchange=lambda mine: [mine, "the loss became nan on rows 5."])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    check.see([(torch.tensor(1.0), [[1]])], 1, optimizer)
    assert optimizer.found_inf == 1  # the step is not taken
    with pytest.raises(TrainingStopped, match="the loss became nan on rows 5"):
        check.settle()
