"""Many prompts on a real model: the texts that each gives alone, and files that go on after a kill."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import fewbits
from fewbits.errors import BadInput
from fewbits.inference.answer_file import answer_file, check_destination, read_rows
from fewbits.inference.generate import Sampling, generate
from fewbits.models.generation.live.answers import Report

GREEDY = Sampling(temperature=0, max_new_tokens=24)
DRAWN = Sampling(temperature=1.2, top_p=0.95, repetition_penalty=1.1, seed=7, max_new_tokens=24)
PROMPTS = [
    "Once upon a time",
    "One day, a caf\u00e9",
    "The big dog",
    "",
    "Tim and Mia went to the park. They",
]
ROWS = [{"id": i, "prompt": prompt} for i, prompt in enumerate(PROMPTS)]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_each_answer_is_what_the_prompt_gives_alone(stories260k: Any) -> None:
    report, order = Report(), []
    found = fewbits.generate_many(
        *stories260k, PROMPTS, GREEDY, at_a_time=3, report=report, on_answer=lambda n, _: order.append(n)
    )
    for prompt, answer in zip(PROMPTS, found, strict=True):
        want = generate(*stories260k, prompt, GREEDY)
        assert (answer.text, answer.tokens, answer.stopped_by) == (want.text, want.tokens, want.stopped_by)
    assert sorted(order) == list(range(5)) and report.plan.slots == 3


def test_seeds_by_row(stories260k: Any) -> None:
    texts = [a.text for a in fewbits.generate_many(*stories260k, PROMPTS, DRAWN)]
    assert texts == [a.text for a in fewbits.generate_many(*stories260k, PROMPTS, DRAWN, at_a_time=1)]
    same = [a.text for a in fewbits.generate_many(*stories260k, ["Once"] * 3, DRAWN)]
    assert len(set(same)) == 3


def test_the_context_ends_a_text(stories260k: Any) -> None:
    long = "and then "
    while len(stories260k.tokenizer(long + "and then ")["input_ids"]) < 490:  # of 512
        long += "and then "
    (answer,) = fewbits.generate_many(*stories260k, [long], Sampling(temperature=0, max_new_tokens=60))
    assert answer.stopped_by in ("context", "end") and answer.tokens <= 60
    want = generate(*stories260k, long, Sampling(temperature=0, max_new_tokens=60))
    assert (answer.text, answer.stopped_by) == (want.text, want.stopped_by)
    with pytest.raises(BadInput, match=r"row 2 has a prompt of .* context holds 512; shorten it"):
        fewbits.generate_many(*stories260k, ["Once", long * 2], GREEDY)


def test_stop_strings_across_tokens(stories260k: Any) -> None:
    """Found where it ends, in the middle of the batch; the others go on."""
    whole = [answer.text for answer in fewbits.generate_many(*stories260k, PROMPTS, GREEDY)]
    stop = whole[0].split(".")[0][-4:] + "."
    found = fewbits.generate_many(*stories260k, PROMPTS, GREEDY, at_a_time=4, stop_strings=[stop])
    assert found[0].stopped_by == "stop" and found[0].text.endswith(stop)
    for text, answer in zip(whole, found, strict=True):
        assert text.startswith(answer.text) and (answer.text == text or stop in answer.text)


def test_words_are_those_of_one_text(stories260k: Any) -> None:
    """A temperature beside the sampling won silently; bans of every token were called NaN."""
    with pytest.raises(BadInput, match="temperature is no word of generate"):
        fewbits.generate_many(*stories260k, PROMPTS, GREEDY, temperature=2.0)
    with pytest.raises(BadInput, match="leave no token to choose for row 1; ban fewer tokens"):
        fewbits.generate_many(*stories260k, PROMPTS, GREEDY, suppress_tokens=list(range(512)))
    found = fewbits.generate_many(*stories260k, PROMPTS[:3], GREEDY, cache="int8", at_a_time=2)
    for prompt, answer in zip(PROMPTS, found, strict=False):
        assert answer.text == generate(*stories260k, prompt, GREEDY, cache="int8").text


def test_prompts_that_cannot_be_encoded_are_named(stories260k: Any) -> None:
    with pytest.raises(BadInput, match=r"row 2: the tokenizer of .* has no chat template"):
        fewbits.generate_many(*stories260k, ["Once", [{"role": "user", "content": "hi"}]], GREEDY)
    for odd, message in (
        (None, "the prompt is None; give a text"),
        ("a\ud800b", r"half a character .'.ud800'"),
    ):
        with pytest.raises(BadInput, match=f"row 2: .*{message}"):
            fewbits.generate_many(*stories260k, ["Once", odd], GREEDY)  # type: ignore[list-item]
    for names in (["a"], "ab", []):
        with pytest.raises(BadInput, match="for 2 prompts; give a list with one name for each"):
            fewbits.generate_many(*stories260k, ["Once", "A"], GREEDY, adapter_names=names)
    with pytest.raises(BadInput, match="put the one text into a list"):
        fewbits.generate_many(*stories260k, "Once", GREEDY)
    assert fewbits.generate_many(*stories260k, [], GREEDY) == []


def test_a_file_of_rows(stories260k: Any, tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", ROWS)
    seen: list[tuple[int, int]] = []
    written = answer_file(
        *stories260k,
        source,
        tmp_path / "out.jsonl",
        GREEDY,
        at_a_time=2,
        progress=lambda *at: seen.append(at),
    )
    found = lines(written.path)
    assert [row["id"] for row in found] == [0, 1, 2, 3, 4]
    want = generate(*stories260k, PROMPTS[2], GREEDY)
    assert found[2] == {**ROWS[2], "answer": want.text, "tokens": want.tokens, "stopped_by": want.stopped_by}
    assert seen == [(n, 5) for n in range(6)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "rows.jsonl"]
    with pytest.raises(BadInput, match=r"out.jsonl is there already"):
        answer_file(*stories260k, source, written.path, GREEDY)


class Killed(Exception):
    """In place of a signal."""


@pytest.mark.parametrize("seed", [7, None])
def test_a_run_that_was_killed_goes_on(seed: int | None, stories260k: Any, tmp_path: Path) -> None:
    """Also if the kill cut a line short; the answers are those of one whole run."""
    source, out = write(tmp_path / "rows.jsonl", ROWS), tmp_path / "out.jsonl"
    sampling = Sampling(temperature=1.0, seed=seed, max_new_tokens=12)

    def kill(done: int, _: int) -> None:
        if done == 3:
            raise Killed

    with pytest.raises(Killed):
        answer_file(*stories260k, source, out, sampling, at_a_time=2, progress=kill)
    part = tmp_path / "out.jsonl.part"
    head, *answers = lines(part)
    assert len(answers) == 3 and not out.exists()
    part.write_text(part.read_text() + '{"row": 4, "answer": "half of', encoding="utf-8")
    for other, named in (
        (Sampling(temperature=1.0, seed=seed, max_new_tokens=13), "other sampling"),
        (Sampling(temperature=1.0, seed=8, max_new_tokens=12), "other seed"),
    ):
        with pytest.raises(BadInput, match=named):
            answer_file(*stories260k, source, out, other)
    for words in ({"cache": "int8"}, {"stop_strings": ["x"]}):
        with pytest.raises(BadInput, match="other words"):
            answer_file(*stories260k, source, out, sampling, **words)
    with pytest.raises(BadInput, match="other model"):
        answer_file(*stories260k, source, out, sampling, of_model={"model": "another"})
    written = answer_file(*stories260k, source, out, sampling)
    assert not list(tmp_path.glob("*.anew"))
    assert (written.rows, written.earlier) == (5, 3)
    whole = Sampling(temperature=1.0, seed=head["seed"], max_new_tokens=12)
    want = [answer.text for answer in fewbits.generate_many(*stories260k, PROMPTS, whole)]
    assert [row["answer"] for row in lines(out)] == want and not part.exists()


def test_a_run_that_was_refused_binds_nobody(stories260k: Any, tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", [{"prompt": "Once"}, {"prompt": "a " * 600}])
    out = tmp_path / "out.jsonl"
    with pytest.raises(BadInput, match="row 2 has a prompt of"):
        answer_file(*stories260k, source, out, GREEDY)
    write(source, ROWS[:1])
    assert answer_file(*stories260k, source, out, Sampling(temperature=0, max_new_tokens=3)).rows == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "rows.jsonl"]


def test_words_of_a_file_are_plain_data(stories260k: Any, tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(BadInput, match="a word of the call is no plain data"):
        answer_file(*stories260k, source, tmp_path / "out.jsonl", GREEDY, logits_processor=[object()])
    written = answer_file(
        *stories260k, source, tmp_path / "out.jsonl", GREEDY, stop_strings=["the"], cache="int8"
    )
    assert written.report.cache == "int8" and any(row["stopped_by"] == "stop" for row in lines(written.path))


def test_a_second_run_on_one_file_is_refused(stories260k: Any, tmp_path: Path) -> None:
    """Both wrote one file of answers so far; the first goes on undisturbed, and may be killed."""
    source, out = write(tmp_path / "rows.jsonl", ROWS), tmp_path / "out.jsonl"
    refused = []

    def second(done: int, _: int) -> None:
        if done == 2:
            for ask in (
                lambda: check_destination(out),
                lambda: answer_file(*stories260k, source, out, Sampling(temperature=0, max_new_tokens=3)),
            ):
                with pytest.raises(
                    BadInput, match=rf"out.jsonl is being written by process {os.getpid()} on"
                ):
                    ask()
                refused.append(ask)

    answer_file(*stories260k, source, out, GREEDY, progress=second)
    want = [answer.text for answer in fewbits.generate_many(*stories260k, PROMPTS, GREEDY)]
    assert len(refused) == 2 and [row["answer"] for row in lines(out)] == want
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "rows.jsonl"]


@pytest.mark.parametrize("words", [{"max_new_tokens": 2.5}, {"top_k": "5"}, {"seed": 1.0}])
def test_settings_that_are_whole_numbers(words: dict[str, Any]) -> None:
    ((name, value),) = words.items()
    with pytest.raises(BadInput, match=f"{name} is {value!r}, and it must be a whole number"):
        Sampling(**words)


@pytest.mark.parametrize("at_a_time", [2.5, "2", True, -1, 0])
def test_no_number_of_texts(at_a_time: Any, stories260k: Any, tmp_path: Path) -> None:
    """-1 of one row read no prompt for ever; 2.5 was a TypeError of a slice."""
    source = write(tmp_path / "rows.jsonl", ROWS)
    for call in (
        lambda: fewbits.generate_many(*stories260k, ["Once"], GREEDY, at_a_time=at_a_time),
        lambda: answer_file(*stories260k, source, tmp_path / "out", GREEDY, at_a_time=at_a_time),
    ):
        with pytest.raises(BadInput, match=f"{at_a_time!r} texts at a time were asked for; give 1 to 256"):
            call()
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n\n", "has no rows"),
        ('{"prompt": "a"}\n\n{"text": "b"}\n', "line 3: the row has neither a prompt nor messages"),
        ('{"prompt": "a", "messages": []}', "line 1: the row has both"),
        ('{"prompt": 3}', "line 1: prompt is not a text"),
        ('{"messages": "hi"}', "line 1: messages is not a list"),
        ('{"prompt": "a", "answer": "b"}', "line 1: the row has a field 'answer'"),
        ('["a"]', "line 1: not an object"),
        ('{"prompt": "a"}\n{"prompt"', "line 2: not JSON"),
    ],
)
def test_rows_that_are_none(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(BadInput, match=message):
        read_rows(path)


def test_a_line_ends_at_a_line_feed_and_nowhere_else(stories260k: Any, tmp_path: Path) -> None:
    """JSON may hold U+2028 and its kind as they are; answers from there on were made again, silently."""
    odd = "a\u2028b\x85c\u2029d"
    rows, path, out = [{"prompt": odd}, {"prompt": "Once"}], tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    text = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())  # as some programs of Windows write it
    assert read_rows(path) == rows

    def kill(done: int, _: int) -> None:
        if done == 1:
            raise Killed

    with pytest.raises(Killed):
        answer_file(*stories260k, path, out, GREEDY, at_a_time=1, progress=kill)
    part = tmp_path / "out.jsonl.part"
    head, answer = part.read_text(encoding="utf-8").rstrip("\n").split("\n")
    kept = json.dumps({**json.loads(answer), "answer": odd}, ensure_ascii=False)
    part.write_text(f"{head}\n{kept}\n", encoding="utf-8")
    answer_file(*stories260k, path, out, GREEDY, at_a_time=1)
    written = [json.loads(line) for line in out.read_text(encoding="utf-8").rstrip("\n").split("\n")]
    assert odd in [row["answer"] for row in written]


def test_a_file_in_the_place_of_the_answers_so_far_is_left_alone(stories260k: Any, tmp_path: Path) -> None:
    source, part = write(tmp_path / "rows.jsonl", ROWS), tmp_path / "out.jsonl.part"
    part.write_text('"not mine"\n')
    with pytest.raises(BadInput, match="holds no answers of fewbits"):
        answer_file(*stories260k, source, tmp_path / "out.jsonl", GREEDY)
    assert part.read_text() == '"not mine"\n'


def test_files_that_will_not_do(stories260k: Any, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read: No such file"):
        read_rows(tmp_path / "none.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00\xd8")
    with pytest.raises(BadInput, match=r"is not UTF-8 text \(byte 0\)"):
        read_rows(tmp_path / "binary.jsonl")
    with pytest.raises(BadInput, match="give its name in place of -"):
        check_destination("-")
    with pytest.raises(BadInput, match="there is no folder"):
        answer_file(*stories260k, write(tmp_path / "rows.jsonl", ROWS), tmp_path / "no" / "out.jsonl")
