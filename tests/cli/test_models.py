"""The commands that load a model, on a small real one."""

from __future__ import annotations

import io
import json
import shutil

import pytest
import torch

from fewbits.inference.evaluate import perplexity
from fewbits.models.fast import FastLanguageModel

CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def model(shared):
    return shared / "data/models/stories260k"


@pytest.fixture(scope="module")
def text(shared):
    return shared / "data/text/tinystories_val.txt"


@pytest.fixture(scope="module")
def chat_model(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


@pytest.fixture(scope="module")
def adapter(model, tmp_path_factory):
    """An adapter that changes what the model says."""
    loaded, tokenizer = FastLanguageModel.from_pretrained(model, load_in_4bit=False)
    adapted = FastLanguageModel.get_peft_model(loaded, r=4)
    torch.manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    folder = tmp_path_factory.mktemp("adapter") / "final"
    adapted.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_eval_prints_nothing_but_the_result(spawn, model, text):
    """In a process of its own: no bar, no warning of the libraries below."""
    shown = spawn("eval", "--model", model, "--text", text, "--max-tokens", 300)
    assert shown.err == ""
    assert shown.code == 0
    assert shown.out.startswith("perplexity ")
    assert "300 tokens, window 512, stride 511" in shown.out


def test_eval_json(run, model, text):
    loaded, tokenizer = FastLanguageModel.from_pretrained(model, load_in_4bit=False)
    expected = perplexity(loaded, tokenizer, text.read_text(), window=64, stride=16, max_tokens=500)
    options = ("--window", 64, "--stride", 16, "--max-tokens", 500, "--json")
    shown = run("eval", "--model", model, "--text", text, *options)
    got = json.loads(shown.out)
    assert got["perplexity"] == pytest.approx(expected.perplexity)
    assert (got["tokens"], got["window"], got["stride"]) == (500, 64, 16)
    packed = json.loads(run("eval", "--model", model, "--text", text, *options, "--recipe", "qlora_nf4").out)
    assert got["perplexity"] < packed["perplexity"] < 1.3 * got["perplexity"]


def test_eval_from_standard_input(run, model, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Once upon a time, there was a little girl."))
    shown = run("eval", "--model", model, "--text", "-")
    assert shown.code == 0
    assert "perplexity" in shown.out


def test_generate(run, model):
    options = ("--model", model, "--temperature", 0, "--max-new-tokens", 20)
    shown = run("generate", *options, "--prompt", "Once upon a time")
    assert shown.code == 0
    assert shown.out.startswith(", there was a little girl named Lily")
    assert "20 tokens" in shown.err
    assert "stopped at --max-new-tokens" in shown.err
    quiet = run("generate", *options, "--prompt", "Once upon a time", "--quiet")
    assert (quiet.out, quiet.err) == (shown.out, "")


def test_a_prompt_from_standard_input_and_a_seed(run, model, monkeypatch):
    outs = []
    for seed in (1, 1, 2):
        monkeypatch.setattr("sys.stdin", io.StringIO("The dog"))
        outs.append(
            run("generate", "--model", model, "--prompt", "-", "--seed", seed, "--max-new-tokens", 20).out
        )
    assert outs[0] == outs[1] != outs[2]


def test_messages(run, chat_model, tmp_path):
    file = tmp_path / "m.json"
    for value in ([{"role": "user", "content": "hi"}], {"messages": [{"role": "user", "content": "hi"}]}):
        file.write_text(json.dumps(value))
        assert run("generate", "--model", chat_model, "--messages", file, "--max-new-tokens", 5).code == 0


@pytest.mark.slow
def test_keys_and_values_in_few_bits(run, shared, text):
    model = shared / "data/models/stories3m"
    common = ("--model", model, "--device", "cpu")
    shown = run("eval", *common, "--text", text, "--max-tokens", 300, "--cache", "int8/int4", "--json")
    result = json.loads(shown.out)
    assert result["kv_cache"] == "int8/int4" and 3 < result["perplexity"] < 8
    how = (*common, "--prompt", "Once upon a time", "--max-new-tokens", 90, "--temperature", 0, "--quiet")
    assert run("generate", *how, "--cache", "int8").out == run("generate", *how).out
    shown = run("generate", *how, "--cache", "q8_0")
    assert shown.code == 2 or shown.code == 1
    assert "no key/value cache in 'q8_0'; known: bfloat16, fp8, int8, int4" in shown.err


def test_words_of_generate(run, model, tmp_path):
    """--stop across the borders of tokens, --min-p and any other word; of one text and of a file."""
    options = ("generate", "--model", model, "--temperature", 0, "--max-new-tokens", 30)
    one = (*options, "--prompt", "Once upon a time", "--quiet")
    assert run(*one, "--stop", "rl nam", "--stop", "zebra").out == ", there was a little girl named\n"
    whole, other = run(*one).out, run(*one, "--word", "no_repeat_ngram_size=1", "--min-p", 0.1).out
    assert other != whole and other.startswith(", there was ")
    assert run(*one, "--word", "num_beams=2").out.startswith(", there was a little")
    source, out = tmp_path / "rows.jsonl", tmp_path / "answers.jsonl"
    source.write_text('{"prompt": "Once upon a time"}\n{"prompt": "The dog"}\n')
    assert run(*options, "--input", source, "--output", out, "--stop", "rl nam").code == 0
    first = json.loads(out.read_text().splitlines()[0])
    assert (first["answer"], first["stopped_by"]) == (", there was a little girl named", "stop")
    for more, message in (
        (("--stop", ""), "give texts of at least one character"),
        (("--word", "frob=2"), "is no word of transformers' generate; write NAME=VALUE"),
        (("--word", "min_p"), "is no word of transformers' generate; write NAME=VALUE"),
        (("--word", "top_k=2"), "has a flag of its own; write --top-k 2"),
        (("--word", "num_return_sequences=2"), "an answer here is one"),
        (("--cache", "int4", "--word", "cache_implementation=static"), "both say how keys and values are"),
        (("--word", "no_repeat_ngram_size=a"), "generate refuses no_repeat_ngram_size"),
    ):
        shown = run(*one, *more)
        assert shown.code == 1 and message in shown.err and "Traceback" not in shown.err


@pytest.mark.slow
def test_guesses_change_no_greedy_text(run, model, shared, tmp_path):
    options = ("generate", "--model", model, "--prompt", "Once upon a time", "--max-new-tokens", 40)
    want = run(*options, "--temperature", 0).out
    assert run(*options, "--temperature", 0, "--lookup", 5).out == want
    for draft in ("stories260k", "stories3m"):  # the second one has another tokenizer
        shown = run(*options, "--temperature", 0, "--draft", shared / "data/models" / draft)
        assert (shown.code, shown.out) == (0, want), shown.err
    assert run(*options, "--seed", 1, "--lookup", 5).code == 0
    for more, message in (
        (("--lookup", 3, "--draft", model), "both guess tokens"),
        (("--lookup", -1), "a number of tokens"),
        (("--draft", tmp_path / "none"), "there is no model folder"),
    ):
        shown = run(*options, *more)
        assert shown.code != 0 and message in shown.err


def test_rows_of_a_file(run, model, tmp_path):
    source, out = tmp_path / "rows.jsonl", tmp_path / "answers.jsonl"
    source.write_text('{"prompt": "Once upon a time", "id": 7}\n\n{"prompt": "The dog"}\n')
    options = ("generate", "--model", model, "--temperature", 0, "--max-new-tokens", 20, "--input", source)
    shown = run(*options, "--output", out, "--at-a-time", 2)
    assert shown.code == 0, shown.err
    assert "2 answers in" in shown.err and "40 tokens" in shown.err and shown.out == ""
    first, second = map(json.loads, out.read_text().splitlines())
    assert first["id"] == 7 and first["answer"].startswith(", there was a little girl named Lily")
    assert (first["tokens"], second["stopped_by"]) == (20, "length")
    for more, message in (
        (("--output", out), "is there already"),
        ((), "--input has no --output; name the file"),
        (("--output", tmp_path / "b", "--at-a-time", 300), "give 1 to 256"),
        (("--output", tmp_path / "b", "--lookup", 4), "one text at a time"),
    ):
        shown = run(*options, *more)
        assert shown.code != 0 and message in shown.err
    shown = run("generate", "--model", model, "--prompt", "a", "--at-a-time", 4)
    assert shown.code != 0 and "--at-a-time belongs to --input" in shown.err


def test_stopping_a_file_of_rows_keeps_the_answers(run, model, tmp_path, monkeypatch):
    source, out = tmp_path / "rows.jsonl", tmp_path / "answers.jsonl"
    source.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("Once", "The", "A", "Tim")))
    options = ("generate", "--model", model, "--max-new-tokens", 8, "--at-a-time", 1, "--seed", 3)
    options += ("--input", source, "--output", out)

    def stop(self, done, total):
        if done == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fewbits.cli.console.Progress.__call__", stop)
        shown = run(*options)
    assert shown.code == 130 and "the same command goes on" in shown.err
    shown = run(*options)
    assert shown.code == 0 and "4 answers" in shown.err and "2 of an earlier run" in shown.err


def test_chat(run, chat_model, monkeypatch):
    lines = "hello\n\n/help\n/reset\nhello\n/exit\nnever read\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    shown = run(
        "generate",
        "--model",
        chat_model,
        "--chat",
        "--system",
        "Be brief.",
        "--temperature",
        0,
        "--max-new-tokens",
        8,
    )
    assert shown.code == 0, shown.err
    first, second = shown.out.splitlines()[0], shown.out.splitlines()[-1]
    assert first == second  # /reset forgot the first question
    assert shown.err.count("8 tokens,") == 2
    assert shown.err.count("/exit or Ctrl-D") == 2


def test_chat_goes_on_when_the_context_is_full(run, chat_model, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("word " * 600 + "\nhello\n"))
    shown = run("generate", "--model", chat_model, "--chat", "--max-new-tokens", 4)
    assert shown.code == 0
    assert "context holds 512" in shown.err
    assert "4 tokens" in shown.err


def test_an_adapter_in_three_ways(run, model, adapter, tmp_path):
    options = ("--prompt", "Once", "--temperature", 0, "--max-new-tokens", 12, "--quiet")
    plain = run("generate", "--model", model, *options)
    direct = run("generate", "--model", adapter, *options)
    put_on = run("generate", "--model", model, "--adapter", adapter, *options)
    assert plain.code == direct.code == put_on.code == 0, direct.err + put_on.err
    assert direct.out == put_on.out != plain.out
    run_folder = tmp_path / "run"
    shutil.copytree(adapter, run_folder / "final")
    (run_folder / "run.json").write_text("{}")
    assert run("generate", "--model", run_folder, *options).out == direct.out


@pytest.mark.parametrize("with_another", [False, True])
def test_adapters_that_rows_choose(run, model, adapter, tmp_path, with_another):
    """Rows without a name have --adapter's, or none."""
    source, out = tmp_path / "rows.jsonl", tmp_path / "answers.jsonl"
    rows = [{"prompt": "Once"}, {"prompt": "Once", "adapter": "mine"}, {"prompt": "Once", "adapter": None}]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("generate", "--model", model, "--temperature", 0, "--max-new-tokens", 12)
    plain, adapted = (
        run(*options, *more, "--prompt", "Once", "--quiet").out.rstrip("\n")
        for more in ((), ("--adapter", adapter))
    )
    if with_another:
        options += ("--adapter", adapter)
    by_row = (*options, "--input", source, "--output", out, "--row-adapter")
    assert run(*by_row, f"mine={adapter}").code == 0
    first, second, third = (json.loads(line) for line in out.read_text().splitlines())
    assert (first["answer"], second["answer"]) == (adapted if with_another else plain, adapted)
    assert third["answer"] == plain != adapted and second["adapter"] == "mine"
    out.unlink()
    for more, message in (
        ((f"other={adapter}",), "row 2 asks for the adapter 'mine'; the model's are:"),
        (("mine",), "--row-adapter mine is not NAME=PATH"),
        ((f"mine={adapter}", "--row-adapter", "mine=x"), "mine is there twice"),
        ((f"mine={tmp_path}",), "adapter"),
    ):
        shown = run(*by_row, *more)
        assert shown.code == 1 and message in shown.err and not out.exists()
    source.write_text('{"prompt": "Once", "adapter": 3}\n')
    assert "row 1: adapter is 3; give the name of an adapter" in run(*by_row, f"mine={adapter}").err


def test_merge(run, model, adapter, tmp_path):
    shown = run("merge", adapter, tmp_path / "merged", "--base", model)
    assert shown.code == 0, shown.err
    assert "35 adapted weights merged" in shown.out
    options = (
        "--prompt",
        "Once",
        "--temperature",
        0,
        "--max-new-tokens",
        12,
        "--quiet",
        "--dtype",
        "float32",
    )
    merged = run("generate", "--model", tmp_path / "merged", *options).out
    assert merged == run("generate", "--model", adapter, *options).out


def test_merge_overwrites_only_what_it_may(run, model, adapter, tmp_path):
    base, own = tmp_path / "base", tmp_path / "adapter"
    shutil.copytree(model, base)
    shutil.copytree(adapter, own)
    (tmp_path / "link").symlink_to(base)
    before = {p.name: p.read_bytes() for p in base.iterdir()}
    for target in (base, f"{base}/", tmp_path / "link", own):
        for flags in ((), ("--overwrite",)):
            shown = run("merge", own, target, "--base", base, *flags)
            assert shown.code != 0 and "never overwritten" in shown.err and "another folder" in shown.err
    assert run("merge", own, tmp_path / "merged", "--base", base).code == 0
    shown = run("merge", own, tmp_path / "merged", "--base", base)
    assert shown.code != 0 and "--overwrite" in shown.err
    assert run("merge", own, tmp_path / "merged", "--base", base, "--overwrite").code == 0
    assert {p.name: p.read_bytes() for p in base.iterdir()} == before
    assert {p.name for p in tmp_path.iterdir()} == {"base", "adapter", "link", "merged"}


def test_quantize(run, model, tmp_path):
    shown = run("quantize", model, tmp_path / "packed", "--recipe", "qlora_nf4")
    assert shown.code == 0, shown.err
    assert "model.layers.*" in shown.out
    assert shown.out.count("self_attn.q_proj") >= 5
    assert "35 weights" in shown.out
    again = run("quantize", model, tmp_path / "json", "--recipe", "int8", "--json")
    table = json.loads(again.out)
    assert len(table["layers"]) == 35
    assert table["layers"][0]["name"] == "model.layers.0.self_attn.q_proj"
    assert (
        run("generate", "--model", tmp_path / "packed", "--prompt", "Once", "--max-new-tokens", 4).code == 0
    )


def test_quantize_for_stochastic_computing(run, model, text, tmp_path):
    shown = run("quantize", model, tmp_path / "sc", "--recipe", "stochastic")
    assert shown.code == 0, shown.err
    assert "35 weights" in shown.out
    shown = run("eval", "--model", tmp_path / "sc", "--text", text, "--max-tokens", 300)
    assert shown.code == 0, shown.err
    assert shown.out.startswith("perplexity ")


def test_report(run, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    shown = run("report", tmp_path)
    assert shown.code == 0
    assert (tmp_path / "report.html").is_file()
    assert str(tmp_path / "report.html") in shown.out.replace("\n", "")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("generate", "--model", "{tmp}/none", "--prompt", "a"), "there is no model folder"),
        (("generate", "--model", "{model}", "--prompt", "a", "--temperature", "-1"), "temperature must be 0"),
        (("generate", "--model", "{model}", "--chat"), "no chat template"),
        (("generate", "--model", "{model}", "--messages", "{tmp}/bad.json"), "bad.json, line 1: not JSON"),
        (("generate", "--model", "{model}", "--messages", "{tmp}/dict.json"), "holds no list of messages"),
        (("generate", "--model", "{model}", "--prompt", "a", "--device", "cuda:99"), "use --device cpu"),
        (("generate", "--model", "{model}", "--prompt", "a", "--device", "abacus"), "no device 'abacus'"),
        (
            ("generate", "--model", "{model}", "--prompt", "a", "--adapter", "{tmp}"),
            "has no adapter_config.json",
        ),
        (("generate", "--model", "{tmp}/run", "--prompt", "a"), "has no model yet"),
        (("eval", "--model", "{model}", "--text", "{tmp}/none.txt"), "no such file or directory"),
        (("eval", "--model", "{model}", "--text", "{tmp}/latin1.txt"), "is not UTF-8 text (byte 3)"),
        (("eval", "--model", "{model}", "--text", "{tmp}/empty.txt"), "0 tokens"),
        (("eval", "--model", "{model}", "--text", "{tmp}/one.txt", "--window", "9999"), "context of 512"),
        (("eval", "--model", "{model}", "--text", "{tmp}/one.txt", "--recipe", "nonsense"), "nonsense"),
        (("quantize", "{model}", "{tmp}/q", "--recipe", "nonsense"), "no recipe named 'nonsense'"),
        (("merge", "{model}", "{tmp}/m"), "is not an adapter"),
        (("report", "{tmp}/none"), "there is no run folder"),
    ],
)
def test_bad_input_is_one_sentence(run, model, tmp_path, argv, message):
    (tmp_path / "bad.json").write_text("[{")
    (tmp_path / "dict.json").write_text('{"a": 1}')
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9 and more")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "one.txt").write_text("Once upon a time")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    shown = run(*(a.format(model=model, tmp=tmp_path) for a in argv))
    assert shown.code == 1
    assert message in shown.err
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_export_writes_gguf_and_prints_the_receipt(run, tmp_path):
    from tests.models.tiny_folders import pair_tokenizer, saved

    base = saved(tmp_path / "base", "llama", pair_tokenizer())
    done = run("export", base, tmp_path / "out", "--to", "gguf:q4_k_m")
    assert done.code == 0 and "same likeliest token" in done.out
    assert (tmp_path / "out" / "base-Q4_K_M.gguf").is_file()
    wrong = run("export", base, tmp_path / "other", "--to", "onnx")
    assert wrong.code == 1 and "gguf:q4_k_m" in wrong.err


def test_export_to_other_engines(run, tmp_path):
    from tests.models.loading import save_tiny

    model = tmp_path / "base"
    save_tiny(model, intermediate_size=128)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "the cat sat on the mat"}\n' * 40)
    done = run("export", model, tmp_path / "gptq", "--to", "gptq:int4_g32", "--no-check")
    assert done.code == 0 and "NOT CHECKED" in done.out
    done = run("export", tmp_path / "gptq", tmp_path / "awq", "--to", "awq")
    assert done.code == 0 and "14 linears with the codes" in done.out and "KL" in done.out
    done = run("export", model, tmp_path / "fp8", "--to", "compressed_tensors:fp8", "--calibrate", rows)
    assert done.code == 0 and "calibrated on" in done.out
    assert run("export", model, tmp_path / "plain", "--to", "bf16").code == 0
    for to, more, reason in (
        ("compressed_tensors:fp8", (), "--calibrate rows.jsonl"),
        ("16bit", ("--no-check",), "rounds nothing"),
        ("awq:int8", (), "gptq:int8"),
    ):
        wrong = run("export", model, tmp_path / "wrong", "--to", to, *more)
        assert wrong.code == 1 and reason in wrong.err and wrong.err.count("\n") == 1
    assert not (tmp_path / "wrong").exists()
