from __future__ import annotations

import copy

import pytest
import torch

import fewbits
from fewbits.errors import BadInput
from fewbits.inference.generate import Sampling, encode_prompt, generate, stream

GREEDY = Sampling(temperature=0, max_new_tokens=60)
CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_greedy_story(stories3m):
    result = generate(*stories3m, "Once upon a time", GREEDY)
    assert result.text.startswith(
        ", there was a little girl named Lily. She loved to play outside in the sunshine."
    )
    assert result.tokens == 60
    assert result.stopped_by == "length"


@pytest.mark.parametrize("name", ["stories260k", pytest.param("stories3m", marks=pytest.mark.slow)])
def test_pieces_join_to_the_whole(name, request):
    """What is streamed is exactly the text that prompt and answer decode to together, less the prompt."""
    model, tokenizer = request.getfixturevalue(name)
    pieces = []
    result = generate(
        model, tokenizer, "One day, a caf\u00e9", Sampling(seed=3, temperature=1.5), on_text=pieces.append
    )
    assert "".join(pieces) == result.text
    assert len(pieces) > 20
    ids = encode_prompt(tokenizer, "One day, a caf\u00e9")
    torch.manual_seed(3)
    out = model.generate(
        ids, do_sample=True, temperature=1.5, top_p=0.95, top_k=0, max_new_tokens=256, pad_token_id=0
    )
    whole, prompt = (tokenizer.decode(x, skip_special_tokens=True) for x in (out[0], ids[0]))
    assert result.text == whole[len(prompt) :]


def test_characters_of_several_tokens_arrive_whole(shared, stories260k):
    """Byte tokens: no piece ends in half a character."""
    from fewbits.inference.generate import Pieces

    tokenizer = stories260k.tokenizer
    text = "snow \u2744\ufe0f and \U0001f600 and \u65e5\u672c\n  done"
    ids = tokenizer(text).input_ids
    pieces = []
    out = Pieces(tokenizer, pieces.append)
    out.put(torch.tensor([ids[:3]]))
    for i in ids[3:]:
        out.put(torch.tensor([i]))
    out.end()
    assert all("\ufffd" not in p for p in pieces)
    assert tokenizer.decode(ids[:3], skip_special_tokens=True) + "".join(pieces) == text


def test_stream_is_the_same_text_and_leaves_the_generators_alone(stories260k):
    sampling = Sampling(seed=1, max_new_tokens=20)
    before = torch.get_rng_state()
    a = "".join(stream(*stories260k, "Once", sampling))
    b = generate(*stories260k, "Once", sampling).text
    assert a == b
    assert torch.equal(before, torch.get_rng_state())
    assert a != generate(*stories260k, "Once", Sampling(seed=2, max_new_tokens=20)).text


def test_closing_a_stream_stops_the_model(stories260k):
    pieces = stream(*stories260k, "Once", Sampling(max_new_tokens=500))
    next(pieces)
    pieces.close()  # joins the thread: hangs here if the model does not stop


def test_errors_cross_the_stream(stories260k):
    with pytest.raises(BadInput, match="no chat template"):
        list(stream(*stories260k, [{"role": "user", "content": "hi"}]))


def test_the_model_ends_by_itself_and_the_context_limits(stories260k):
    model, tokenizer = stories260k
    result = generate(model, tokenizer, "Once upon a time", Sampling(temperature=0, max_new_tokens=2000))
    assert result.stopped_by in ("end", "context")
    assert result.tokens <= 512
    with pytest.raises(BadInput, match="context holds 512"):
        generate(model, tokenizer, "word " * 600, GREEDY)


def test_chat_uses_the_template(stories260k):
    model, tokenizer = stories260k
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = CHATML
    messages = [{"role": "user", "content": "hi"}]
    ids = encode_prompt(tokenizer, messages)
    assert tokenizer.decode(ids[0]).endswith("<|user|>hi\n<|assistant|>")
    assert generate(model, tokenizer, messages, Sampling(max_new_tokens=5, seed=0)).tokens <= 5
    with pytest.raises(BadInput, match="message 1"):
        encode_prompt(tokenizer, [{"content": "hi"}])
    with pytest.raises(BadInput, match="no messages"):
        encode_prompt(tokenizer, [])


def test_empty_prompt_starts_from_bos(stories260k):
    assert encode_prompt(stories260k.tokenizer, "").tolist() == [[1]]


@pytest.mark.parametrize(
    "field",
    [{"max_new_tokens": 0}, {"temperature": -1}, {"top_p": 0}, {"top_k": -1}, {"repetition_penalty": 0}],
)
def test_bad_sampling(field):
    with pytest.raises(BadInput, match=next(iter(field))):
        Sampling(**field)


def test_what_is_no_prompt_no_sampling_and_no_tokenizer(stories260k):
    model, tokenizer = stories260k
    for call in (generate, lambda *args: list(stream(*args))):
        with pytest.raises(BadInput, match="a list of 2 texts; give one, or all to"):
            call(model, tokenizer, ["Once", "One day"], GREEDY)
        with pytest.raises(BadInput, match=r"sampling is \{'temperature': 0\}; give a fewbits.Sampling"):
            call(model, tokenizer, "Once", {"temperature": 0})
        with pytest.raises(
            BadInput, match="the tokenizer is None; give the one that from_pretrained returns"
        ):
            call(model, None, "Once", GREEDY)
    with pytest.raises(BadInput, match="sampling is 0"):
        fewbits.generate_many(model, tokenizer, ["Once"], 0)


@pytest.mark.slow
def test_keys_and_values_in_few_bits(stories3m) -> None:
    """Of a plain model of transformers, and by the choice that stands on it."""
    model, tokenizer = stories3m
    greedy = Sampling(temperature=0, max_new_tokens=80)
    plain = generate(model, tokenizer, "Once upon a time", greedy)
    assert generate(model, tokenizer, "Once upon a time", greedy, cache="int8").text == plain.text
    assert "".join(stream(model, tokenizer, "Once upon a time", greedy, cache="int8")) == plain.text
    coarse = generate(
        model, tokenizer, "Once upon a time", greedy, cache={"name": "int4", "newest": 1, "first": 0}
    )
    assert coarse.text != plain.text  # the cache is read
    with pytest.raises(BadInput, match="no key/value cache in 'int2'"):
        generate(model, tokenizer, "Once", greedy, cache="int2")
