"""Rows with images in `fewbits train`: the processor's own tensors, a whole run, and what is refused."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.image_utils import load_image

from fewbits import FastVisionModel
from fewbits.errors import BadInput, Unsupported
from fewbits.models.vision import read_processor
from fewbits.training.ahead.preview import preview
from fewbits.training.config import TrainConfig
from fewbits.training.data.collator import Collator
from fewbits.training.data.examples import RowEncoder
from fewbits.training.data.mix import RunData, load_run_data
from fewbits.training.data.pictures import picture_of
from fewbits.training.run import train
from fewbits.training.setup.evaluate_rows import evaluate_rows
from fewbits.training.setup.images import look_of
from fewbits.training.setup.model_and_trainer import load_tokenizer
from tests.models.loading import save_tiny
from tests.models.seeing import KINDS, picture, save_seeing

_QUESTION = {"type": "text", "text": "Colour?"}
_COLORS = {"red": (250, 0, 0), "green": (0, 250, 0), "blue": (0, 0, 250)}
_SIZES = [(40, 61), (90, 33), (56, 28)]


def _row(content: Any, answer: Any, **more: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}],
        **more,
    }


def _written(folder: Path) -> tuple[list[dict[str, Any]], list[list[str]]]:
    """Rows with images in every form, without, with two; and the files of each."""
    names = []
    for (name, color), size in zip(_COLORS.items(), _SIZES, strict=True):
        picture(color, size).save(folder / f"{name}.png")
        names.append(f"{name}.png")
    data = "data:image/png;base64," + base64.b64encode((folder / names[2]).read_bytes()).decode()
    rows = [
        _row([{"type": "image", "image": names[0]}, _QUESTION], [{"type": "text", "text": "red"}]),
        _row([{"type": "image"}, _QUESTION], "green", images=[names[1]]),
        _row("Colour?", "blue", images=[{"path": names[2], "bytes": None}]),
        _row([{"type": "image_url", "image_url": {"url": data}}, _QUESTION], "blue"),
        _row("Hello?", "Hi."),
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "path": names[0]},
                        _QUESTION,
                        {"type": "image", "url": names[1]},
                    ],
                },
                {"role": "assistant", "content": "two"},
                {"role": "user", "content": [{"type": "image", "image": names[2]}]},
                {"role": "assistant", "content": "blue"},
            ]
        },
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return rows, [[names[0]], [names[1]], [names[2]], [names[2]], [], names]


def _config(folder: Path, **more: Any) -> TrainConfig:
    return TrainConfig(model=str(folder / "model"), train_data=str(folder / "rows.jsonl"), **more)


def _loaded(config: TrainConfig, length: int = 256) -> tuple[RowEncoder, RunData]:
    light = load_tokenizer(config)
    assert light is not None
    tokenizer, shapes = light
    encoder = RowEncoder(tokenizer, config, length, look_of(shapes, tokenizer, config.model))
    return encoder, load_run_data(encoder)


def _inputs(batch: dict[str, Any]) -> dict[str, Any]:
    return {n: v for n, v in batch.items() if n not in ("rows", "num_tokens", "valid_rows")}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("on_disk", [False, True])
def test_batches_are_what_the_processor_makes(kind: str, on_disk: bool, tmp_path: Path) -> None:
    save_seeing(kind, tmp_path / "model")
    rows, files = _written(tmp_path)
    encoder, data = _loaded(_config(tmp_path, data_on_disk=str(tmp_path) if on_disk else None))
    collate = Collator(0, sight=encoder.chat.sight)
    processor = AutoProcessor.from_pretrained(tmp_path / "model")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    total, count = 0.0, 0
    for example, row, names in zip(data.train.examples, rows, files, strict=True):
        places = iter([Image.open(tmp_path / name).convert("RGB") for name in names])
        messages = [
            {**m, "content": _as_processors_want(m["content"], names, places)} for m in row["messages"]
        ]
        theirs = processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")
        ours = _inputs(collate([[example]]))
        for name in set(theirs) - {"attention_mask"}:
            assert torch.equal(ours[name], theirs[name]), name
        assert ours.keys() - {"labels"} == theirs.keys() - {"attention_mask"}
        labels = ours["labels"][ours["labels"] != -100]
        answers = [m["content"][0]["text"] for m in messages if m["role"] == "assistant"]
        assert encoder.tokenizer.decode(labels) == "".join(f"{answer}</s>" for answer in answers)
        with torch.no_grad():
            loss = model(**ours).loss
            assert torch.equal(loss, model(**theirs, labels=ours["labels"]).loss)
            if names:
                other = model(**{**ours, "pixel_values": -ours["pixel_values"]}).loss
                assert not torch.equal(loss, other)
        total, count = total + float(loss) * len(labels), count + len(labels)
    with torch.no_grad():  # all in one batch, padded: the mean over the tokens of all rows
        whole = model(**_inputs(collate([[e] for e in data.train.examples]))).loss
    assert float(whole) == pytest.approx(total / count, abs=2e-6)


def _as_processors_want(content: Any, names: list[str], places: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        parts = [{"type": "text", "text": content}]
        return parts if len(names) != 1 or "?" not in content else [_next(places), *parts]
    return [part if part["type"] == "text" else _next(places) for part in content]


def _next(places: Any) -> dict[str, Any]:
    return {"type": "image", "image": next(places)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_from_beginning_to_end(kind: str, tmp_path: Path) -> None:
    save_seeing(kind, tmp_path / "model")
    _written(tmp_path)
    config = _config(
        tmp_path,
        output_dir=str(tmp_path / "run"),
        recipe="qlora_nf4",
        max_steps=2,
        batch_size=3,
        save_steps=1,
        scheduler="constant",
        keep_best=False,
        learning_rate=0.01,
        eval_data=str(tmp_path / "rows.jsonl"),
        samples=2,
        sample_tokens=4,
        merge=True,
        device="cpu",
    )
    assert preview(config).lengths[0] > 10
    train(config)
    samples = json.loads((tmp_path / "run" / "samples.json").read_text(encoding="utf-8"))
    assert [Path(s["images"][0]).name for s in samples] == ["red.png", "green.png"]
    assert all("after" in s for s in samples)
    merged = tmp_path / "run" / "merged"
    processor = AutoProcessor.from_pretrained(merged)
    model = AutoModelForImageTextToText.from_pretrained(merged, dtype=torch.float32)
    assert (
        load_file(merged / "model.safetensors").keys()
        == load_file(tmp_path / "model" / "model.safetensors").keys()
    )
    result = evaluate_rows(model, processor.tokenizer, replace(config, model=str(merged)), answers=3)
    assert result.answered == 3 and result.tokens == 33
    adapted, _ = FastVisionModel.from_pretrained(
        tmp_path / "run" / "final", load_in_4bit=False, dtype=torch.float32
    )
    expected = evaluate_rows(adapted, processor.tokenizer, replace(config, model=str(merged)))
    assert abs(result.loss - expected.loss) < 0.02  # merged weights are in bfloat16
    half = replace(config, output_dir=str(tmp_path / "half"), max_steps=1)
    train(half)
    train(replace(half, max_steps=2), resume=True)  # the same weights
    one, two = (
        load_file(tmp_path / name / "final" / "adapter_model.safetensors") for name in ("run", "half")
    )
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert any((tmp_path / "run" / "final").glob("*processor*.json"))


_MESSAGES = [{"type": "image", "image": "red.png"}, _QUESTION]
_BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no such file": (_row([{"type": "image", "image": "none.png"}], "x"), {}, "there is no image none.png"),
    "no picture": (_row([{"type": "image", "image": "rows.jsonl"}], "x"), {}, "cannot be read"),
    "not fetched": (_row([{"type": "image", "url": "https://a.b/c.png"}], "x"), {}, "is not fetched"),
    "base64": (_row([{"type": "image", "base64": "?"}], "x"), {}, "no valid base64"),
    "a number": (_row("Colour?", "x", image=3), {}, "neither a file's name nor bytes"),
    "missing": (_row([{"type": "image"}, _QUESTION], "x"), {}, "1 places for images, and the row has 0"),
    "too many": (_row([{"type": "image"}], "x", images=["red.png"] * 2), {}, "1 places .* has 2 images"),
    "twice": (_row(_MESSAGES, "x", images=["red.png"]), {}, "both within its messages and beside"),
    "a mark": (
        _row([*_MESSAGES, {"type": "text", "text": "<start_of_image>"}], "x"),
        {},
        "2 times <start",
    ),
    "video": (_row([{"type": "video", "video": "a.mp4"}], "x"), {}, "a part of type video"),
    "audio": (_row("Colour?", "x", audio=["a.wav"]), {}, "the row has audio, and .* reads text and images"),
    "no words": (_row(_MESSAGES, " "), {}, "no token to train on"),
    "text row": ({"text": "abc", "images": ["red.png"]}, {}, "need a conversation"),
    "pair": ({"prompt": "a", "completion": "b", "images": ["red.png"]}, {}, "need a conversation"),
    "packed": (_row(_MESSAGES, "x"), {"packing": True}, "packing is true"),
    "cut": (
        _row([{"type": "text", "text": "a" * 20}, *_MESSAGES], "x"),
        {"max_seq_length": 31, "long_rows": "truncate", "responses_only": False},
        "end within an image",
    ),
    "template": (_row(_MESSAGES, "x"), {"chat_template": "chatml"}, "writes no place for an image"),
}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing")
    save_seeing("gemma3", folder / "model")
    _written(folder)
    return folder


@pytest.mark.parametrize("name", _BAD)
def test_bad_rows_get_one_sentence(name: str, seeing: Path, tmp_path: Path) -> None:
    row, settings, sentence = _BAD[name]
    data = seeing / f"{name}.jsonl"
    data.write_text(json.dumps(row), encoding="utf-8")
    config = replace(_config(seeing, **settings), train_data=str(data))
    with pytest.raises(BadInput, match=sentence):
        preview(config)


@pytest.mark.parametrize("place", ["before", "after"])
def test_texts_with_tokens_of_an_image_are_refused(place: str, seeing: Path) -> None:
    """Wherever they stand in the data: a batch of theirs has more such tokens than images, and would end."""
    rows = [_row("What is <image_soft>?", "A token."), _row(_MESSAGES, "red")]
    data = seeing / f"{place}.jsonl"
    data.write_text("\n".join(map(json.dumps, rows if place == "before" else rows[::-1])), encoding="utf-8")
    config = replace(_config(seeing), train_data=str(data))
    with pytest.raises(BadInput, match=f"row {1 if place == 'before' else 2}: the row's (text|tokens)"):
        preview(config)


def test_models_without_eyes_and_processors_without_files(seeing: Path, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text((seeing / "rows.jsonl").read_text(encoding="utf-8"))
    with pytest.raises(BadInput, match="row 1: a message holds a part of type image, and the model reads"):
        preview(_config(tmp_path))
    (tmp_path / "rows.jsonl").write_text(json.dumps(_row("Colour?", "x", images=[{"path": "red.png"}])))
    with pytest.raises(BadInput, match="row 1: the row has images, and the model reads text alone; take one"):
        preview(_config(tmp_path))
    blind = tmp_path / "blind"
    blind.mkdir()
    for file in (seeing / "model").iterdir():
        if "processor" not in file.name:
            (blind / file.name).write_bytes(file.read_bytes())
    with pytest.raises(Unsupported, match=r"no processor of images .*copy these files"):
        preview(replace(_config(seeing), model=str(blind)))
    with pytest.raises(Unsupported, match="no processor of images"):
        read_processor(str(blind), None)


def test_images_as_data_sets_hold_them(seeing: Path) -> None:
    image = picture((1, 2, 3), (30, 20))
    written = io.BytesIO()
    image.save(written, format="PNG")
    for value in (image, written.getvalue(), {"bytes": written.getvalue(), "path": "x.png"}):
        read = picture_of(value, seeing)
        assert read.size == (30, 20) and read.opened().tobytes() == image.tobytes()
    assert picture_of("red.png", seeing) == picture_of(str(seeing / "red.png"), Path())


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photos_stand_upright_as_transformers_reads_them(orientation: int, tmp_path: Path) -> None:
    """A camera's file says how it was held; the answer sees such a photo upright, so training does too."""
    photo = Image.new("RGB", (48, 32), (250, 0, 0))
    photo.paste((0, 0, 250), (0, 0, 16, 32))
    exif = Image.Exif()
    exif[0x0112] = orientation
    photo.save(tmp_path / "photo.jpg", exif=exif, quality=95)
    found, wanted = picture_of("photo.jpg", tmp_path), load_image(str(tmp_path / "photo.jpg"))
    assert found.size == wanted.size == found.opened().size
    assert found.size == ((48, 32) if orientation < 5 else (32, 48))
    assert found.opened().tobytes() == wanted.tobytes()


def test_other_images_under_the_same_names_are_other_data(seeing: Path, tmp_path: Path) -> None:
    prints = []
    for color in ("red", "blue"):
        picture(_COLORS[color], (30, 30)).save(tmp_path / "a.png")
        (tmp_path / "rows.jsonl").write_text(json.dumps(_row("Colour?", "x", images=["a.png"])))
        config = replace(_config(tmp_path), model=str(seeing / "model"))
        prints.append(_loaded(config)[1].train.fingerprint())
    assert prints[0] != prints[1]
