"""Uploads through huggingface_hub to a hub that runs here: one commit with a card, or a sentence."""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from fewbits import FastLanguageModel
from fewbits.errors import BadInput, Unsupported
from fewbits.models.writing import hub
from fewbits.models.writing.model_card import Card, without_paths
from tests.models.loading import save_tiny


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's interface as an upload of small files asks for."""

    def do_POST(self):
        text = self.rfile.read(int(self.headers["Content-Length"]))
        kept, path = self.server.kept, self.path.partition("?")[0]
        kept["asked"].append(path)
        if path == "/api/repos/create":
            facts = json.loads(text)
            kept["private"] = facts.get("private", facts.get("visibility"))
            name = f"{facts.get('organization') or 'me'}/{facts['name']}"
            self.answer({"url": f"http://127.0.0.1/{name}", "id": name, "name": name})
        elif path == "/api/validate-yaml":  # the card's head
            assert json.loads(text)["content"].startswith("---\n")
            self.answer({"errors": [], "warnings": []})
        elif path.endswith("/preupload/main"):
            files = json.loads(text)["files"]
            modes = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]
            self.answer({"files": modes})
        elif path.endswith("/commit/main"):
            lines = [json.loads(line) for line in text.splitlines()]
            kept["commits"].append(
                {
                    x["value"]["path"]: base64.b64decode(x["value"]["content"])
                    for x in lines
                    if x["key"] == "file"
                }
            )
            address = f"{self.server.address}/me/model/commit/{'1' * 40}"
            self.answer({"commitUrl": address, "commitOid": "1" * 40, "success": True})
        else:
            self.answer({"error": "what is this?"}, 404)

    def do_GET(self):
        self.answer({"error": "nothing here"}, 404)

    def answer(self, facts, code=200):
        text = json.dumps(facts).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *words):
        pass


@pytest.fixture
def kept(monkeypatch):
    """What the hub here was asked for, and got."""
    import huggingface_hub.constants as constants

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.address = f"http://127.0.0.1:{server.server_port}"
    server.kept = {"asked": [], "commits": []}
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    yield server.kept
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("hub") / "base"
    save_tiny(place)
    return place


@pytest.fixture
def adapted(folder):
    model, tokenizer = FastLanguageModel.from_pretrained(folder, load_in_4bit=True)
    return FastLanguageModel.get_peft_model(model, r=4), tokenizer


def test_an_adapter_goes_up_in_one_commit_with_a_card(adapted, kept, tmp_path):
    model, tokenizer = adapted
    address = model.push_to_hub("me/model", tokenizer, token="t", base_model="org/base", private=True)
    assert address.endswith("1" * 40) and len(kept["commits"]) == 1 and kept["private"] in (True, "private")
    files = kept["commits"][0]
    assert {"README.md", "adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= files.keys()
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "org/base"
    card = files["README.md"].decode()
    assert "base_model: org/base" in card and "library_name: peft" in card and "qlora_nf4" in card
    assert 'from_pretrained("me/model")' in card and "modules replaced" in card
    for name, content in files.items():  # what came is what opens
        (tmp_path / name).write_bytes(content)
    again, _ = FastLanguageModel.from_pretrained(tmp_path, base_model=model.config.name_or_path)
    assert again.peft_config["default"].r == 4


def test_no_path_of_this_machine_stands_in_a_card(adapted, kept, folder):
    model, tokenizer = adapted
    model.push_to_hub_merged("me/model", tokenizer, save_method="merged_16bit", token="t")
    model.push_to_hub_merged("me/model", tokenizer, save_method="merged_4bit", token="t")
    for files, kind in zip(kept["commits"], ("merged", "packed"), strict=True):
        card = files["README.md"].decode()
        assert str(folder) not in card and f"- {kind}" in card and "config.json" in files
    assert "quantization_config" in json.loads(kept["commits"][1]["config.json"])
    assert without_paths("in /home/me/x.jsonl of /a/b/, 3/4, org/name") == "in x.jsonl of b, 3/4, org/name"


def test_a_packed_model_and_gguf_go_up(folder, kept, monkeypatch):
    model, _ = FastLanguageModel.from_pretrained(folder, load_in_4bit=True)
    model.push_to_hub("model", token="t")
    assert "quantization_config" in json.loads(kept["commits"][0]["config.json"])
    assert "tokenizer.json" in kept["commits"][0]

    def written(model, place, tokenizer, method, **options):  # the files themselves are other tests' matter
        place.mkdir()
        (place / f"{method}.gguf").write_bytes(b"GGUF")

    monkeypatch.setattr(hub, "save_pretrained_gguf", written)
    model.push_to_hub_gguf("model", quantization_method="q4_0", token="t")
    assert kept["commits"][1]["q4_0.gguf"] == b"GGUF" and b"llama-cli -hf" in kept["commits"][1]["README.md"]


@pytest.mark.parametrize(
    ("name", "options", "error", "sentence"),
    [
        ("me/model", {"token": "t", "offline": True}, Unsupported, "while HF_HUB_OFFLINE is set"),
        ("me/model", {}, BadInput, "you are not logged in to the Hub"),
        ("me/my model", {"token": "t"}, BadInput, "is no name of a repository"),
        ("me/model", {"token": "t"}, BadInput, "nobody else could load it; give its name"),
        ("me/model", {"token": "t", "base_model": "here"}, BadInput, "name it as on the hub"),
    ],
)
def test_what_cannot_go_up_is_refused_before_work(adapted, kept, monkeypatch, name, options, error, sentence):
    import huggingface_hub

    model, tokenizer = adapted
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    if options.pop("offline", False):
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(type(model), "save_pretrained", None)
    monkeypatch.setattr(hub, "save_pretrained_merged", None)
    for call in (model.push_to_hub, model.push_to_hub_merged, model.push_to_hub_gguf):
        if "nobody else could load it" in sentence and call is not model.push_to_hub:
            continue
        with pytest.raises(error, match=sentence):
            call(name, tokenizer, **options)
    assert not kept["asked"]


def test_what_the_hub_refuses_is_one_sentence(adapted, kept, monkeypatch):
    model, tokenizer = adapted
    monkeypatch.setattr(
        Hub,
        "do_POST",
        lambda self: (
            self.rfile.read(int(self.headers["Content-Length"])),
            self.answer({"error": "not yours"}, 403),
        ),
    )
    with pytest.raises(BadInput, match="me/model could not be written on the hub"):
        model.push_to_hub("me/model", tokenizer, token="t", base_model="org/base")


def test_a_run_says_how_it_was_made(tmp_path, kept, capsys, folder):
    """``fewbits push`` of a run's folder, whose record and curve the card tells."""
    from fewbits.cli import main

    run = tmp_path / "run"
    model, tokenizer = FastLanguageModel.from_pretrained(folder, load_in_4bit=False, dtype=torch.float32)
    model.save_pretrained(run / "final")
    tokenizer.save_pretrained(run / "final")
    record = {
        "model": str(folder),
        "method": "dpo",
        "steps": 30,
        "recipe": {"name": "qlora_nf4"},
        "data": {"train": {"path": "/home/me/pairs.jsonl"}},
        "versions": {"torch": "2.13"},
    }
    (run / "run.json").write_text(json.dumps(record))
    lines = [
        {"step": i, "loss": 3.0 - i / 10, **({"eval_loss": 2.5} if i == 30 else {})} for i in range(1, 31)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    from huggingface_hub import constants

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.get_token", lambda: "t")
        assert main(["push", str(run), "me/model", "--dataset", "org/set"]) == 0
    assert constants.ENDPOINT in capsys.readouterr().out
    card = kept["commits"][0]["README.md"].decode()
    assert "| data | pairs.jsonl |" in card and "/home" not in card and "- org/set" in card
    assert "| 30 | 0.0000 | 2.5000 |" in card and "| method | dpo |" in card
    assert main(["push", str(tmp_path), "me/model"]) == 1
    assert main(["push", str(run / "nowhere"), "me/model"]) == 1


def test_a_card_with_nothing_to_tell_is_short():
    text = Card("plain").text("me/model")
    assert "How it" not in text and "# model" in text and "base_model" not in text
