"""What a row becomes: formats, spans, begin and end tokens, lengths, and each refusal."""

from __future__ import annotations

import json
from unicodedata import normalize

import pytest
from transformers import AutoTokenizer

from fewbits.errors import BadInput, Unsupported
from fewbits.training.config import TrainConfig
from fewbits.training.data.examples import RowEncoder, load_data, read_samples, split_rows
from tests.training.conftest import byte_tokenizer


@pytest.fixture(scope="session")
def llama(shared):
    return AutoTokenizer.from_pretrained(shared / "data/models/stories3m")


@pytest.fixture(scope="session")
def gpt2(shared):
    return AutoTokenizer.from_pretrained(shared / "data/tokenizers/gpt2")


@pytest.fixture(scope="module")
def loaded_qwen(shared):
    return AutoTokenizer.from_pretrained(shared / "data/tokenizers/qwen2.5")


@pytest.fixture
def qwen(loaded_qwen, monkeypatch):
    """The tokenizer, whose template a test may replace."""
    monkeypatch.setattr(loaded_qwen, "chat_template", loaded_qwen.chat_template)
    return loaded_qwen


def encoder(tokenizer, length=512, **options):
    return RowEncoder(tokenizer, TrainConfig(model="m", train_data="d", **options), length)


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def trained_text(tokenizer, example):
    return tokenizer.decode(example.input_ids[example.trained].tolist())


def only(data):
    (example,) = data.examples
    return example


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen"])
@pytest.mark.parametrize(
    "prompt, response", [("Say: ", "Tope is a fish."), ("Q?\n", "\nNo."), ("a b", "cd e")]
)
def test_completion_trains_the_response_and_its_end(name, prompt, response, request, tmp_path):
    tokenizer = request.getfixturevalue(name)
    path = write_jsonl(tmp_path / "d.jsonl", [{"prompt": prompt, "completion": response}])
    example = only(load_data(path, encoder(tokenizer)))
    ids = example.input_ids.tolist()
    assert trained_text(tokenizer, example).strip() == (response + tokenizer.eos_token).strip()
    assert ids.count(tokenizer.eos_token_id) == 1 and ids[-1] == tokenizer.eos_token_id
    if name == "llama":
        assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1
    # The prompt has the tokens it has when the model answers it.
    head = encoder(tokenizer).prompt_ids(prompt)
    assert ids[: len(head)] == head
    assert not example.trained[: len(head)].any() and example.trained[len(head) :].all()


def test_a_text_with_its_own_begin_and_end_gets_no_second_ones(llama, tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [{"text": "<s>Once upon a time.</s>"}])
    ids = only(load_data(path, encoder(llama))).input_ids.tolist()
    assert ids.count(1) == 1 and ids.count(2) == 1 and ids[0] == 1 and ids[-1] == 2


@pytest.mark.parametrize("template", ["alpaca", "question", "{instruction}\n{input}\n>> "])
def test_instruction_rows(llama, tmp_path, template):
    rows = [
        {"instruction": "Add {input} and {instruction}.", "input": "2, 3", "output": "5"},
        {"instruction": "Greet.", "context": "", "response": "Hello you"},
    ]
    for row in rows:
        path = write_jsonl(tmp_path / "d.jsonl", [row])
        example = only(load_data(path, encoder(llama, prompt_template=template)))
        assert trained_text(llama, example) == row.get("output", row.get("response")) + "</s>"


def test_dolly_rows(llama, shared):
    path = shared / "data/instruct/dolly_eval.jsonl"
    data = load_data(path, encoder(llama, prompt_template="question"))
    rows = [json.loads(line) for line in path.open()]
    assert data.report.rows == len(rows) == 300
    assert data.report.format == "instruction"
    assert data.report.truncated > 0 and data.report.examples + data.report.dropped == 300
    for example in data.examples[:40]:
        text = trained_text(llama, example).removesuffix("</s>").strip()
        if len(example) < 512:
            assert text == llama.decode(llama(rows[example.row - 1]["response"]).input_ids[1:]).strip()


MESSAGES = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!\n"},
    {"role": "user", "content": "assistant\nassistant"},
    {"role": "assistant", "content": "assistant"},
]


def test_chat_trains_each_response_with_its_end_of_turn(qwen, tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [{"messages": MESSAGES}])
    example = only(load_data(path, encoder(qwen)))
    assert trained_text(qwen, example) == "Hello!\n<|im_end|>assistant<|im_end|>"
    text = qwen.apply_chat_template(MESSAGES, tokenize=False)
    assert qwen.decode(example.input_ids.tolist()).removesuffix(qwen.eos_token) == text


def test_sharegpt_is_the_same_chat(qwen, tmp_path):
    turns = [{"from": "human" if m["role"] == "user" else "gpt", "value": m["content"]} for m in MESSAGES]
    one = only(load_data(write_jsonl(tmp_path / "a.jsonl", [{"messages": MESSAGES}]), encoder(qwen)))
    two = only(load_data(write_jsonl(tmp_path / "b.jsonl", [{"conversations": turns}]), encoder(qwen)))
    assert one.input_ids.tolist() == two.input_ids.tolist() and (one.trained == two.trained).all()


def test_a_response_that_begins_with_a_line_break_is_split_from_the_header(qwen, tmp_path):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "\n\nYes"}]
    example = only(load_data(write_jsonl(tmp_path / "d.jsonl", [{"messages": messages}]), encoder(qwen)))
    assert trained_text(qwen, example) == "\n\nYes<|im_end|>"
    head = qwen.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    ids = qwen(head, add_special_tokens=False).input_ids
    assert example.input_ids[: len(ids)].tolist() == ids


def test_generation_marks_of_a_template_win(qwen, tmp_path):
    qwen.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>{% generation %}{{ m.content }}!{%"
        " endgeneration %}<|im_end|>{% else %}<|im_start|>{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    example = only(load_data(write_jsonl(tmp_path / "d.jsonl", [{"messages": MESSAGES}]), encoder(qwen)))
    assert trained_text(qwen, example) == "Hello!\n!assistant!"


FORGETS = (  # as templates do that drop the thoughts of earlier answers
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}(thought)"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_that_rewrites_earlier_turns_gives_one_row_for_each_response(qwen, tmp_path):
    qwen.chat_template = FORGETS
    data = load_data(write_jsonl(tmp_path / "d.jsonl", [{"messages": MESSAGES}]), encoder(qwen))
    assert [trained_text(qwen, e) for e in data.examples] == [
        "(thought)Hello!\n<|im_end|>",
        "(thought)assistant<|im_end|>",
    ]
    assert {e.row for e in data.examples} == {1}


def test_a_template_without_exact_places_is_refused(qwen, tmp_path):
    qwen.chat_template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    path = write_jsonl(tmp_path / "d.jsonl", [{"messages": MESSAGES}])
    with pytest.raises(Unsupported, match="no exact place"):
        load_data(path, encoder(qwen))
    assert len(load_data(path, encoder(qwen, responses_only=False)).examples) == 1


@pytest.mark.slow
def test_oasst_chats(qwen, shared):
    path = shared / "data/instruct/oasst_chat.jsonl"
    data = load_data(path, encoder(qwen, length=100_000))
    rows = [json.loads(line)["messages"] for line in path.open()]
    assert len(data.examples) == len(rows) == 405
    for example, messages in zip(data.examples, rows, strict=True):
        answers = "".join(m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant")
        assert trained_text(qwen, example) == normalize("NFC", answers)  # as the tokenizer does


def test_all_tokens_train_without_responses_only(llama, tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "One two", "completion": " three"}])
    assert only(load_data(path, encoder(llama, responses_only=False))).trained[1:].all()


def test_files_of_every_kind_give_the_same_rows(llama, tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": f'Count "{i}", ', "completion": f"then\n{i + 1}"} for i in range(5)]
    data = datasets.Dataset.from_list(rows)
    write_jsonl(tmp_path / "d.jsonl", rows)
    (tmp_path / "d.json").write_text(json.dumps(rows, indent=1))
    data.to_csv(tmp_path / "d.csv")
    data.to_parquet(tmp_path / "d.parquet")
    data.save_to_disk(tmp_path / "folder")
    datasets.DatasetDict(train=data, test=data.select([0])).save_to_disk(tmp_path / "splits")
    prints = {
        name: load_data(tmp_path / name, encoder(llama)).fingerprint()
        for name in ("d.jsonl", "d.json", "d.csv", "d.parquet", "folder", "splits")
    }
    assert len(set(prints.values())) == 1, prints
    assert load_data(tmp_path / "splits", encoder(llama), splits=("validation", "test")).report.rows == 1


def test_plain_text_is_cut_into_windows(llama, shared, tmp_path):
    text = (shared / "data/text/tiny_shakespeare.txt").read_text()[:20_000]
    (tmp_path / "d.txt").write_text(text)
    data = load_data(tmp_path / "d.txt", encoder(llama, length=64))
    assert all(len(e) <= 64 and e.input_ids[0] == 1 and e.trained[1:].all() for e in data.examples)
    joined = [i for e in data.examples for i in e.input_ids[1:].tolist()]
    assert joined == [*llama(text, add_special_tokens=False).input_ids, 2]


def test_long_rows(llama, tmp_path):
    rows = [
        {"prompt": "word " * 30, "completion": "x"},  # nothing of the response would be left
        {"prompt": "a", "completion": "word " * 30},
        {"prompt": "a", "completion": "b"},
    ]
    path = write_jsonl(tmp_path / "d.jsonl", rows)
    report = load_data(path, encoder(llama, length=20)).report
    assert (report.rows, report.examples, report.truncated, report.dropped) == (3, 2, 2, 1)
    report = load_data(path, encoder(llama, length=20, long_rows="drop")).report
    assert (report.examples, report.truncated, report.dropped) == (1, 0, 2)
    with pytest.raises(BadInput, match=r"row 1 has \d+ tokens, but max_seq_length is 20"):
        load_data(path, encoder(llama, length=20, long_rows="refuse"))


def test_split_is_by_row_and_repeats(llama, tmp_path):
    rows = [{"prompt": f"a {i}", "completion": "b"} for i in range(20)]
    data = load_data(write_jsonl(tmp_path / "d.jsonl", rows), encoder(llama))
    train, held = split_rows(data, 0.2, seed=1)
    assert len(held.examples) == 4 and len(train.examples) == 16
    assert not {e.row for e in train.examples} & {e.row for e in held.examples}
    assert split_rows(data, 0.2, seed=1)[1].fingerprint() == held.fingerprint()
    assert split_rows(data, 0.2, seed=2)[1].fingerprint() != held.fingerprint()


def test_samples_are_prompts_with_expected_answers(llama, qwen, tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [{"prompt": f"a {i}", "completion": f"b {i}"} for i in range(3)])
    assert read_samples(path, encoder(llama), [2], "completion", splits=("train",)) == [
        {"prompt": "a 1", "expected": "b 1"}
    ]
    path = write_jsonl(tmp_path / "d.jsonl", [{"messages": MESSAGES}])
    (sample,) = read_samples(path, encoder(qwen), [1], "chat", splits=("train",))
    assert sample["expected"] == "assistant" and sample["prompt"].endswith("<|im_start|>assistant\n")


# Bad input


def test_chat_rows_need_a_template(llama, tmp_path):
    with pytest.raises(BadInput, match="no chat template, which chat rows need"):
        load_data(
            write_jsonl(tmp_path / "d.jsonl", [{"messages": MESSAGES}]), encoder(llama, skip_bad_rows=True)
        )


def test_malformed_jsonl_names_file_and_line(llama, tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"text": "good"}\n\n{"text": \n[1]\n{"text": "good"}\n')
    with pytest.raises(BadInput, match=r"d\.jsonl, line 3 is not valid JSON"):
        load_data(path, encoder(llama))
    report = load_data(path, encoder(llama, skip_bad_rows=True)).report
    assert (report.examples, report.skipped) == (2, 2)


@pytest.mark.parametrize(
    "row, sentence",
    [
        ({"prompt": "a", "completion": "  "}, "no token to train on"),
        ({"prompt": "a", "completion": None}, "completion is not text"),
        ({"prompt": 3, "completion": "b"}, "prompt is not text"),
        ({"prompt": "a"}, "no completion"),
    ],
)
def test_rows_that_cannot_be_used(llama, tmp_path, row, sentence):
    path = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "a", "completion": "b"}, row])
    with pytest.raises(BadInput, match=rf"d\.jsonl, row 2: .*{sentence}.*skip_bad_rows"):
        load_data(path, encoder(llama))
    report = load_data(path, encoder(llama, skip_bad_rows=True)).report
    assert (report.examples, report.skipped) == (1, 1)


@pytest.mark.parametrize(
    "messages, sentence",
    [
        ([], "at least one message"),
        ([{"role": "user", "content": "a"}], "no token to train on"),
        ([{"content": "a"}], "role and a content"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}], "no token to train on"),
    ],
)
def test_chats_that_cannot_be_used(qwen, tmp_path, messages, sentence):
    path = write_jsonl(tmp_path / "d.jsonl", [{"messages": MESSAGES}, {"messages": messages}])
    with pytest.raises(BadInput, match=sentence):
        load_data(path, encoder(qwen))
    assert load_data(path, encoder(qwen, skip_bad_rows=True)).report.skipped == 1


def test_what_the_template_refuses_is_a_bad_row(qwen, tmp_path):
    qwen.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(BadInput, match="roles must alternate"):
        load_data(write_jsonl(tmp_path / "d.jsonl", [{"messages": MESSAGES}]), encoder(qwen))


def test_empty_data(llama, tmp_path):
    for name, text in (("d.jsonl", "\n"), ("d.json", "[]"), ("d.csv", "text\n"), ("d.txt", " \n")):
        (tmp_path / name).write_text(text)
        with pytest.raises(BadInput, match="is empty"):
            load_data(tmp_path / name, encoder(llama))
    path = write_jsonl(tmp_path / "d.jsonl", [{"text": ""}])
    with pytest.raises(BadInput, match="no usable row"):
        load_data(path, encoder(llama, skip_bad_rows=True))


def test_wrong_columns(llama, tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [{"question": "a", "answer": "b"}])
    with pytest.raises(BadInput, match="has the columns question, answer, but auto rows need messages"):
        load_data(path, encoder(llama))
    with pytest.raises(BadInput, match="but chat rows need messages"):
        load_data(path, encoder(llama, format="chat"))
    fields = {"prompt": "question", "completion": "answer"}
    assert trained_text(llama, only(load_data(path, encoder(llama, fields=fields)))) == "b</s>"


@pytest.mark.parametrize(
    "name, content, sentence",
    [
        ("none.jsonl", None, "no data file"),
        ("d.bin", "x", "kind of .* is not known"),
        ("d.json", '{"a": [1,\n}', r"line 2 is not valid JSON"),
        ("d.csv", "text,b\nonly one\n", "line 2 has not as many cells"),
        ("d.parquet", "text", "not a readable Parquet file"),
        ("folder", "", "was not saved by datasets"),
    ],
)
def test_unreadable_files(llama, tmp_path, name, content, sentence):
    if name == "folder":
        (tmp_path / name).mkdir()
    elif content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(BadInput, match=sentence):
        load_data(tmp_path / name, encoder(llama))


def test_too_few_rows_to_hold_out(llama, tmp_path):
    data = load_data(write_jsonl(tmp_path / "d.jsonl", [{"text": "a"}]), encoder(llama))
    with pytest.raises(BadInput, match="too few to hold out"):
        split_rows(data, 0.5, seed=0)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(10 ** 12) %}x{% endfor %}",
        "{{ 1 // 0 }}",
        "{{ messages[99].content }}",
        "{{ messages + 3 }}",
        "{{ none.upper() }}",
        "{{ raise_exception('no') }}",
        "{% generation %}{{ 1 // 0 }}{% endgeneration %}",
    ],
)
def test_a_template_that_fails_is_one_sentence(template):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(BadInput, match="the chat template refuses the messages"):
        encoder(tokenizer).chat.encode_chat(messages, responses_only=True)
