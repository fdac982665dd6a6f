# ruff: noqa: E501 (tables of cases)
"""Corrupt model folders by the hundred, tried through the public doors: each is refused in a sentence.

    python -m tests.models.corrupt_folders [--every N] [--only WORD] [--seconds S]

makes each folder from the demo's trained model (plain, sharded, packed, with an adapter), tries every door on
it in a process of its own, and prints the outcomes that are no sentence ("raw" or "hang") and the counts, as
JSON. A corruption that does no harm loads, which is right as well.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.forks import fork

Corrupt = Callable[[Path], None]
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MEMORY_BYTES = 6 * 2**30  # of one door's process, above what it has


# 1. What is done to a file.


def cut(name: str, keep: int) -> Corrupt:
    """Keep the first bytes, or (negative) all but the last."""
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:keep])


def write(name: str, data: bytes | str) -> Corrupt:
    """Other contents."""
    return lambda folder: (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)


def flip(name: str, at: float, mask: int = 0xFF) -> Corrupt:
    """One byte changed, at a share of the file's length."""

    def change(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[int(at * (len(data) - 1))] ^= mask
        (folder / name).write_bytes(bytes(data))

    return change


def gone(name: str) -> Corrupt:
    """The file is missing."""
    return lambda folder: (folder / name).unlink()


def as_folder(name: str) -> Corrupt:
    """A folder in the file's place."""

    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return change


def as_loop(name: str) -> Corrupt:
    """A symbolic link to itself in the file's place."""

    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(folder / name)

    return change


def as_pipe(name: str) -> Corrupt:
    """A named pipe, from which a reader would wait for ever."""

    def change(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


def unreadable(name: str) -> Corrupt:
    """No permission to read (nothing changes for root)."""
    return lambda folder: (folder / name).chmod(0)


def field(name: str, path: str, value: Any) -> Corrupt:
    """One field of a JSON file, named by its keys with dots between; `...` takes it away."""

    def change(folder: Path) -> None:
        top = json.loads((folder / name).read_text())
        place, keys = top, path.split(".")
        for key in keys[:-1]:
            place = place[int(key)] if isinstance(place, list) else place.setdefault(key, {})
        if value is ...:
            place.pop(keys[-1], None)
        else:
            place[keys[-1]] = value
        (folder / name).write_text(json.dumps(top))

    return change


def header(edit: Callable[[dict[str, Any]], Any], name: str = WEIGHTS) -> Corrupt:
    """Another safetensors header over the same data; ``edit`` changes it in place or returns another."""

    def change(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        found = json.loads(data[8 : 8 + length])
        changed = edit(found)
        text = json.dumps(found if changed is None else changed).encode()
        (folder / name).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return change


def tensors(edit: Callable[[dict[str, Any]], Any]) -> Corrupt:
    """Other tensors in a sound safetensors file."""

    def change(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        found = load_file(folder / WEIGHTS)
        edit(found)
        save_file({k: v.contiguous() for k, v in found.items()}, folder / WEIGHTS, metadata={"format": "pt"})

    return change


def in_header(**changes: Any) -> Corrupt:
    """Fields of one entry of the header."""
    return header(lambda h: h[_second(h)].update(changes))


def _second(found: dict[str, Any]) -> str:
    return sorted(k for k in found if k != "__metadata__")[1]


# 2. The folders.

NUMBERS = (0, -1, 1, 10**6, 2**63, 1e308, 1.5, "many", None, True, [], {})
ODD = ("x", -1, [], {}, None, 10**12)
DEEP = "[" * 100_000 + "]" * 100_000
JSON_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
TEXTS = {
    "empty": "",
    "half an object": "{",
    "a list": "[]",
    "a number": "7",
    "null": "null",
    "an empty object": "{}",
    "deep": DEEP,
    "deep object": '{"a":' * 50_000 + "1" + "}" * 50_000,
    "latin-1": '{"model_type": "llama", "x": "\xe9"}'.encode("latin-1"),
    "utf-16": '{"model_type": "llama"}'.encode("utf-16"),
    "zeros": b"\0" * 4096,
    "nan": '{"model_type": NaN}',
    "a long number": '{"vocab_size": ' + "9" * 5000 + "}",
}


def config_cases() -> Iterator[tuple[str, str, Corrupt]]:
    """Cases of config.json: (base, name, corruption)."""
    for key in ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads"):
        for value in NUMBERS:
            yield "plain", f"config {key}={value!r}", field("config.json", key, value)
    for key in ("intermediate_size", "num_key_value_heads", "head_dim", "max_position_embeddings"):
        for value in (0, -1, 10**6, "x", 1.5, []):
            yield "plain", f"config {key}={value!r}", field("config.json", key, value)
    for key, values in {
        "model_type": ODD,
        "hidden_act": ("nothing", 3, None),
        "dtype": ("float99", 3, [], "nn", "__builtins__"),
        "rms_norm_eps": ("x", -1.0, []),
        "rope_parameters": (
            "x",
            [],
            {"rope_type": "nothing"},
            {"rope_theta": "x", "rope_type": "default"},
            5,
        ),
        "eos_token_id": ("x", -1, 10**9, [2, "x"], {}),
        "pad_token_id": ("x", 10**9, -1),
        "tie_word_embeddings": ("x", None, False),
        "architectures": ("x", ["Nothing"], 5, [3]),
        "text_config": ("x", 5, []),
        "quantization_config": ("x", 5, [], {}, {"quant_method": 5}, {"quant_method": ["x"]}, True),
        "transformers_weights": ("../x.safetensors", 5, "x"),
        "auto_map": ("x", {"AutoConfig": "x.y"}, 5),
        "attn_implementation": ("nothing",),
        "transformers_version": (5, "x"),
    }.items():
        for value in values:
            yield "plain", f"config {key}={value!r}", field("config.json", key, value)


def json_cases() -> Iterator[tuple[str, str, Corrupt]]:
    """Every JSON file, whole."""
    for name in JSON_FILES:
        for what, text in TEXTS.items():
            yield "plain", f"{name} is {what}", write(name, text)
        yield "plain", f"{name} cut", cut(name, -20)
        yield "plain", f"{name} is missing", gone(name)
        yield "plain", f"{name} is a folder", as_folder(name)
        yield "plain", f"{name} is a loop", as_loop(name)
        yield "plain", f"{name} is a pipe", as_pipe(name)
        yield "plain", f"{name} is unreadable", unreadable(name)
    for at in (0.1, 0.3, 0.5, 0.7, 0.9):
        yield "plain", f"tokenizer.json flipped at {at}", flip("tokenizer.json", at)
        yield "plain", f"config.json flipped at {at}", flip("config.json", at)
    for path, values in {
        "model.type": ("Nothing", 5), "model.vocab": ({}, [], "x", {"a": -1}, {"a": 10**12}),
        "model.merges": (["x"], "x", [["a", "b", "c"]]), "added_tokens": ("x", [{}], [5]),
        "pre_tokenizer": ("x", {"type": "Nothing"}), "decoder": ("x", {"type": "Nothing"}), "version": (5,),
    }.items():  # fmt: skip
        for value in values:
            yield "plain", f"tokenizer {path}={value!r}", field("tokenizer.json", path, value)
    for key, values in {
        "tokenizer_class": ("Nothing", 5, "LlamaTokenizer"), "model_max_length": ("x", -1), "pad_token": (5, []),
        "bos_token": (5, {"x": 1}), "chat_template": (5, "{% for", "{{ 1 / 0 }}", [{"name": "x"}]),
        "added_tokens_decoder": ("x", {"x": 5}, {"5": {}}), "auto_map": ({"AutoTokenizer": ["x", None]},),
    }.items():  # fmt: skip
        for value in values:
            yield "plain", f"tokenizer_config {key}={value!r}", field("tokenizer_config.json", key, value)
    for key, values in {
        "max_length": ("x", -1),
        "temperature": ("x", -1),
        "eos_token_id": ("x", [[]]),
    }.items():
        for value in values:
            yield "plain", f"generation {key}={value!r}", field("generation_config.json", key, value)


def weight_cases() -> Iterator[tuple[str, str, Corrupt]]:
    """The safetensors file."""
    for keep in (0, 1, 7, 8, 9, 100, 1000, 10_000, -1, -1000, -1_000_000):
        yield "plain", f"weights cut to {keep}", cut(WEIGHTS, keep)
    for at in (0.0, 2e-6, 3.5e-6, 1e-5, 1e-4, 5e-4):
        yield "plain", f"weights flipped at {at}", flip(WEIGHTS, at)
    for length in (0, 1, 2**20, 2**31, 2**63, 2**64 - 1):
        yield "plain", f"header length {length}", write(WEIGHTS, struct.pack("<Q", length) + b"{}" * 40)
    for what, change in {
        "shape of text": in_header(shape="x"), "shape of floats": in_header(shape=[1.5]),
        "negative shape": in_header(shape=[-1, -128]), "huge shape": in_header(shape=[2**62, 2**62]),
        "no shape": header(lambda h: h[_second(h)].pop("shape") and None), "shape null": in_header(shape=None),
        "shape of lists": in_header(shape=[[1], [2]]), "three dimensions": in_header(shape=[1, 1, 1]),
        "unknown dtype": in_header(dtype="F99"), "dtype 5": in_header(dtype=5), "dtype I8": in_header(dtype="I8"),
        "dtype BOOL": in_header(dtype="BOOL"), "dtype F64": in_header(dtype="F64"),
        "offsets of text": in_header(data_offsets=["a", "b"]), "one offset": in_header(data_offsets=[0]),
        "offsets swapped": in_header(data_offsets=[100, 0]), "negative offsets": in_header(data_offsets=[-9, -1]),
        "offsets null": in_header(data_offsets=None), "huge offsets": in_header(data_offsets=[0, 2**63]),
        "offsets overlap": in_header(data_offsets=[0, 64]), "entry is a list": header(lambda h: {"x": []}),
        "entry is null": header(lambda h: {**h, "x": None}), "header is a list": header(lambda h: [1]),
        "header is text": header(lambda h: "x"), "no tensors": header(lambda h: {}),
        "metadata is a list": header(lambda h: {**h, "__metadata__": [1]}),
        "metadata of numbers": header(lambda h: {**h, "__metadata__": {"format": 5}}),
        "metadata of another format": header(lambda h: {**h, "__metadata__": {"format": "tf"}}),
        "names renamed": header(lambda h: {f"x.{k}": v for k, v in h.items()}),
        "deep header": write(WEIGHTS, struct.pack("<Q", len(DEEP)) + DEEP.encode()),
    }.items():  # fmt: skip
        yield "plain", f"header: {what}", change
    for what, edit in {
        "one tensor less": lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
        "no norm": lambda t: t.pop("model.norm.weight"),
        "no embedding": lambda t: t.pop("model.embed_tokens.weight"),
        "transposed": lambda t: t.update({"model.layers.1.mlp.up_proj.weight": t["model.layers.1.mlp.up_proj.weight"].T}),
        "of zero size": lambda t: t.update({"model.layers.1.mlp.up_proj.weight": t["model.norm.weight"][:0]}),
        "a scalar": lambda t: t.update({"model.layers.1.mlp.up_proj.weight": t["model.norm.weight"][0].clone()}),
        "integers": lambda t: t.update({"model.layers.1.mlp.up_proj.weight": t["model.layers.1.mlp.up_proj.weight"].int()}),
        "booleans": lambda t: t.update({"model.norm.weight": t["model.norm.weight"].bool()}),
        "float8": lambda t: t.update({k: v.to(_float8()) for k, v in t.items()}),
        "complex": lambda t: t.update({"model.norm.weight": t["model.norm.weight"].cfloat()}),
        "NaN": lambda t: t["model.layers.1.mlp.up_proj.weight"].fill_(float("nan")),
        "one more": lambda t: t.update({"model.layers.99.mlp.up_proj.weight": t["model.norm.weight"].clone()}),
        "nothing": lambda t: t.clear(),
    }.items():  # fmt: skip
        yield "plain", f"tensors: {what}", tensors(edit)
    for what, change in (
        ("missing", gone),
        ("a folder", as_folder),
        ("a loop", as_loop),
        ("a pipe", as_pipe),
    ):
        yield "plain", f"weights are {what}", change(WEIGHTS)
    yield "plain", "weights are unreadable", unreadable(WEIGHTS)
    yield "plain", "weights are a pickle", _as_pickle


def _float8() -> Any:
    import torch

    return torch.float8_e4m3fn


def _as_pickle(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04N.")


def index_cases() -> Iterator[tuple[str, str, Corrupt]]:
    """A sharded model: its index and shards."""
    shard = "model-00002-of-00003.safetensors"
    for what, text in TEXTS.items():
        yield "sharded", f"index is {what}", write(INDEX, text)
    for value in (..., None, [], {}, "x", 5, {"x": 5}, {"x": None}, {"x": ["a"]}, {"x": ""}, {"x": "."}):
        yield "sharded", f"weight_map={value!r}", field(INDEX, "weight_map", value)
    for place in ("../plain/model.safetensors", "/etc/passwd", "pytorch_model.bin", "x\0y", "x" * 5000, "config.json",
                  "..", "a/../../x.safetensors", "\udcff.safetensors"):  # fmt: skip
        yield "sharded", f"weight_map names {place[:30]!r}", _one_place(place)
    for value in ("x", 5, None, {"total_size": "x"}, {"total_size": -1}):
        yield "sharded", f"index metadata={value!r}", field(INDEX, "metadata", value)
    for what, change in (
        ("missing", gone),
        ("a folder", as_folder),
        ("a loop", as_loop),
        ("a pipe", as_pipe),
    ):
        yield "sharded", f"a shard is {what}", change(shard)
        yield "sharded", f"the index is {what}", change(INDEX)
    for keep in (0, 8, 500, -1):
        yield "sharded", f"a shard cut to {keep}", cut(shard, keep)
    yield "sharded", "a pickle as a shard", _pickle_shard
    yield (
        "sharded",
        "one shard twice",
        lambda f: shutil.copy(f / "model-00001-of-00003.safetensors", f / shard),
    )


def _one_place(place: str) -> Corrupt:
    def change(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"][sorted(index["weight_map"])[0]] = place
        (folder / INDEX).write_text(json.dumps(index))

    return change


def _pickle_shard(folder: Path) -> None:
    (folder / "evil.bin").write_bytes(b"\x80\x04N.")
    _one_place("evil.bin")(folder)


def packed_cases() -> Iterator[tuple[str, str, Corrupt]]:
    """A folder that fewbits packed, its settings and parts; and a folder in bitsandbytes' form."""
    q = "quantization_config."
    for key in ("recipe", "formats", "source", "layout_version", "quant_method"):
        for value in ("x", 5, -1, [], {}, None, [5], ...):
            yield "packed", f"{key}={value!r}", field("config.json", q + key, value)
    for path in ("linear", "linear.weight", "overrides", "skip", "lora", "qat", "name", "head", "nothing"):
        for value in ("x", 5, [], {}, [["x"]], [5], None):
            yield "packed", f"recipe.{path}={value!r}", field("config.json", f"{q}recipe.{path}", value)
    for key in ("block", "bits", "values", "name"):
        for value in (0, -1, 3, "x", 10**9, [], None, 1.5):
            yield "packed", f"weight.{key}={value!r}", _weight_field(key, value)
    for value in ("x", 5, {"x": 1}):
        yield "packed", f"one setting more {value!r}", field("config.json", q + "more", value)
    for part in ("weight_codes", "weight_scales"):
        name = f"model.layers.1.mlp.up_proj.{part}"
        for what, edit in {
            "missing": lambda t, n=name: t.pop(n), "shorter": lambda t, n=name: t.update({n: t[n][:-1]}),
            "of zero size": lambda t, n=name: t.update({n: t[n][:0]}), "flat": lambda t, n=name: t.update({n: t[n].flatten()}),
            "of float64": lambda t, n=name: t.update({n: t[n].double()}), "a scalar": lambda t, n=name: t.update({n: t[n].flatten()[0].clone()}),
            "of bool": lambda t, n=name: t.update({n: t[n].bool()}), "renamed": lambda t, n=name: t.update({n + "x": t.pop(n)}),
        }.items():  # fmt: skip
            yield "packed", f"{part} {what}", tensors(edit)
    yield (
        "packed",
        "codes of a layer that is not there",
        tensors(
            lambda t: t.update({"model.layers.9.mlp.up_proj.weight_codes": t["model.norm.weight"].clone()})
        ),
    )
    yield "packed", "no quantization_config", field("config.json", "quantization_config", ...)
    yield (
        "packed",
        "as bitsandbytes",
        field("config.json", "quantization_config", {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    )
    yield (
        "packed",
        "as gptq",
        field("config.json", "quantization_config", {"quant_method": "gptq", "bits": 4}),
    )


def _weight_field(key: str, value: Any) -> Corrupt:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        rule = config["quantization_config"]["recipe"]["linear"]
        rule["weight"] = {
            **(rule["weight"] if isinstance(rule["weight"], dict) else {"name": rule["weight"]}),
            key: value,
        }
        (folder / "config.json").write_text(json.dumps(config))

    return change


def adapter_cases() -> Iterator[tuple[str, str, Corrupt]]:
    """The folder of an adapter."""
    for what, text in TEXTS.items():
        yield "adapter", f"adapter_config is {what}", write("adapter_config.json", text)
    for key in (
        "r",
        "lora_alpha",
        "target_modules",
        "peft_type",
        "base_model_name_or_path",
        "rank_pattern",
        "bias",
    ):
        for value in (0, -1, "x", [], {}, None, 10**9, [5]):
            yield "adapter", f"adapter {key}={value!r}", field("adapter_config.json", key, value)
    for keep in (0, 8, 500, -1):
        yield "adapter", f"adapter weights cut to {keep}", cut("adapter_model.safetensors", keep)
    for what, change in (
        ("missing", gone),
        ("a folder", as_folder),
        ("a loop", as_loop),
        ("a pipe", as_pipe),
    ):
        yield "adapter", f"adapter weights are {what}", change("adapter_model.safetensors")
        yield "adapter", f"adapter_config is {what}", change("adapter_config.json")


def cases() -> list[tuple[str, str, Corrupt]]:
    """Every case: the folder it begins with, its name, and what is done."""
    return [
        *config_cases(),
        *json_cases(),
        *weight_cases(),
        *index_cases(),
        *packed_cases(),
        *adapter_cases(),
    ]


# 3. The doors.


def load(folder: Path) -> None:
    """As Python does, in 4 bits."""
    from fewbits import FastLanguageModel

    FastLanguageModel.from_pretrained(folder)


def load_plain(folder: Path) -> None:
    """As Python does, unpacked."""
    from fewbits import FastLanguageModel

    FastLanguageModel.from_pretrained(folder, load_in_4bit=False)


def generate(folder: Path) -> None:
    """``fewbits generate``."""
    command("generate", "--model", folder, "--prompt", "2+3=", "--max-new-tokens", "2", "--quiet")


def generate_chat(folder: Path) -> None:
    """``fewbits generate`` of messages."""
    messages = folder.parent / "messages.json"
    messages.write_text('[{"role": "user", "content": "2+3="}]')
    command("generate", "--model", folder, "--messages", messages, "--max-new-tokens", "2", "--quiet")


def evaluate(folder: Path) -> None:
    """``fewbits eval``."""
    text = folder.parent / "text.txt"
    text.write_text("Add 2 and 3. That is 5. Add 7 and 2.")
    command("eval", "--model", folder, "--text", text)


def quantize(folder: Path) -> None:
    """``fewbits quantize``."""
    command("quantize", folder, folder.parent / f"{folder.name}-out", "--recipe", "int8")


def command(*words: Any) -> None:
    """Run a command of ``fewbits``: what it says of its failure, as an error of ours; what it did not foresee as RuntimeError."""
    from fewbits.cli import main
    from fewbits.errors import FewbitsError

    told = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(told):
        code = main([str(word) for word in words])
    last = told.getvalue().strip().splitlines()[-1:] or [""]
    if code and last[0].startswith("error: "):
        raise FewbitsError(last[0])
    if code:
        raise RuntimeError(last[0])


DOORS = (load, generate, quantize, load_plain, evaluate, generate_chat)


def doors(base: str, number: int) -> list[Callable[[Path], None]]:
    """The doors to try for one case: the first two always, the others in turn."""
    rest = DOORS[2:] if base in ("plain", "sharded") else DOORS[3:]
    return [*DOORS[:2], rest[number % len(rest)]]


def is_sentence(text: str) -> bool:
    """One sentence, of one line and no endless one."""
    return "\n" not in text and text.endswith(".") and len(text) < 1500


def outcome(
    door: Callable[[Path], None], folder: Path, seconds: int, good: Callable[[str], bool] = is_sentence
) -> tuple[str, str]:
    """Try one door in a process of its own: ("fine" | "sentence" | "raw" | "hang", what was said).

    ``good`` tells a sentence from what is none among the messages of our own errors.
    """
    reading, writing = os.pipe()
    child = fork()
    if child == 0:
        os.close(reading)
        with contextlib.suppress(BaseException):
            os.write(writing, json.dumps(_try(door, folder, good)).encode()[:60_000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        ended = _wait(child, seconds)
        told = stream.read() if ended else b""
    if not ended:
        return "hang", f"not done after {seconds} s"
    found = json.loads(told) if told else ("raw", "the process died")
    return found[0], found[1]


def _try(door: Callable[[Path], None], folder: Path, good: Callable[[str], bool]) -> tuple[str, str]:
    from fewbits.errors import FewbitsError

    here = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (here + MEMORY_BYTES, resource.RLIM_INFINITY))
    try:
        door(folder)
    except FewbitsError as error:
        return ("sentence" if good(str(error)) else "raw"), str(error)
    except BaseException as error:  # noqa: BLE001 (what is counted here)
        import traceback

        frame = traceback.extract_tb(error.__traceback__)[-1]
        return "raw", f"{type(error).__name__}: {str(error)[:300]} ({frame.filename}:{frame.lineno})"
    return "fine", ""


def _wait(child: int, seconds: int) -> bool:
    """True if the process ended by itself; else it is killed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def make_bases(place: Path) -> None:
    """The sound folders that the cases begin with."""
    from fewbits import FastLanguageModel, demo

    plain = place / "plain"
    shutil.copytree(Path(demo.__file__).parent / "assets", plain)
    model, tokenizer = FastLanguageModel.from_pretrained(plain, load_in_4bit=False)
    for name, options in (("sharded", {"max_shard_size": "900KB"}),):
        model.save_pretrained(place / name, **options)
        tokenizer.save_pretrained(place / name)
    model, _ = FastLanguageModel.from_pretrained(plain, load_in_8bit=True)
    model.save_pretrained(place / "packed")
    tokenizer.save_pretrained(place / "packed")
    FastLanguageModel.get_peft_model(model, r=2).save_pretrained(place / "adapter")


def run(every: int = 1, only: str = "", seconds: int = 20) -> dict[str, Any]:
    """Every case at its doors: counts by outcome, and what was neither fine nor a sentence."""
    chosen = [(i, *c) for i, c in enumerate(cases()) if i % every == 0 and only in c[1]]
    counts: Counter[str] = Counter()
    bad = []
    began = time.monotonic()
    slowest = 0.0
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        make_bases(place)
        for number, base, what, corrupt in chosen:
            for door in doors(base, number):
                folder = place / "case" / base
                shutil.rmtree(folder.parent, ignore_errors=True)
                folder.parent.mkdir()
                shutil.copytree(place / base, folder)
                corrupt(folder)
                start = time.monotonic()
                kind, said = outcome(door, folder, seconds)
                slowest = max(slowest, time.monotonic() - start)
                counts[kind] += 1
                if kind in ("raw", "hang"):
                    bad.append(
                        {"case": what, "base": base, "door": door.__name__, "outcome": kind, "said": said}
                    )
                    sys.stderr.write(json.dumps(bad[-1]) + "\n")
    return {
        "folders": len(chosen),
        "tries": sum(counts.values()),
        "outcomes": dict(counts),
        "slowest_s": round(slowest, 1),
        "seconds": round(time.monotonic() - began),
        "bad": bad,
    }


def main() -> int:
    """See the head of this file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=int, default=20)
    args = parser.parse_args()
    result = run(args.every, args.only, args.seconds)
    sys.stdout.write(json.dumps(result) + "\n")
    return bool(result["bad"])


if __name__ == "__main__":
    sys.exit(main())
