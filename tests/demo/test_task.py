"""The task: held out by content, fair answers, reproducible."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from fewbits.demo.task import (
    KINDS,
    Questioner,
    check_held_out,
    every_pair,
    make_task,
    split_pairs,
)
from fewbits.errors import BadInput


@pytest.mark.parametrize("seed", range(12))
def test_no_pair_of_a_test_report_occurs_in_training(seed):
    task = make_task(seed, num_train=2000, num_test=140)
    trained = {pair for question in task.train for fact in question.facts for pair in fact.pairs}
    for question in task.test:
        for fact in question.facts:
            assert not fact.pairs & trained
    assert not {q.prompt for q in task.train} & {q.prompt for q in task.test}
    assert not {q.report for q in task.train} & {q.report for q in task.test}
    assert len(task.train) == 2000
    assert len({q.prompt for q in task.train}) == 2000


def test_the_split_is_a_partition_that_depends_on_the_seed():
    train, held_out = split_pairs(random.Random(1))
    assert not train & held_out
    assert train | held_out == every_pair()
    assert len(held_out) == pytest.approx(0.25 * len(every_pair()), rel=0.02)
    assert split_pairs(random.Random(2))[1] != held_out


def test_a_leak_is_refused():
    task = make_task(0, num_train=50, num_test=50)
    with pytest.raises(BadInput, match="not held out"):
        check_held_out((*task.train, replace(task.test[0], question="Who?")), task.test)


def test_same_seed_same_task_other_seed_other_task():
    first, again, other = (make_task(seed, num_train=70, num_test=70) for seed in (5, 5, 6))
    assert first == again
    assert not {q.prompt for q in first.test} & {q.prompt for q in other.test}


def test_answers_follow_from_the_report_alone():
    """An independent reader of the report's sentences finds the same answers."""
    for question in make_task(3, num_train=700, num_test=700).test:
        sentences = [s for s in question.report.split(". ") if " a " in s]
        assert len(sentences) == len(question.facts)
        if question.kind == "count":
            assert question.answer == ("two", "three", "four")[len(sentences) - 2]
            continue
        words = set(question.question.rstrip("?").split())
        clues = [f for f in question.facts if {f.person, f.object} & words or f.place in question.question]
        assert len(clues) == 1, question
        fact = clues[0]
        wanted = {
            "owner": fact.person,
            "visitor": fact.person,
            "place": fact.place,
            "search": fact.place,
            "thing": f"a {fact.colour} {fact.object}",
            "colour": fact.colour,
        }
        assert question.answer == wanted[question.kind]
        assert any(fact.person in s and f"a {fact.colour} {fact.object} {fact.place}" in s for s in sentences)


def test_all_kinds_are_asked_in_turn():
    task = make_task(0, num_train=70, num_test=len(KINDS))
    assert tuple(q.kind for q in task.test) == KINDS


def test_a_row_is_prompt_and_completion():
    question = Questioner(every_pair(), random.Random(0)).question("owner")
    assert question.row == {"prompt": question.prompt, "completion": f" {question.answer}"}
    assert question.prompt.endswith("\nAnswer:")


def test_too_few_questions_are_refused():
    with pytest.raises(BadInput, match="at least one question of each kind"):
        make_task(0, num_train=3, num_test=70)
