"""Trains the tiny Llama that `fewbits demo` ships, from nothing: corpus, tokenizer, weights, model card.

    python scripts/train_demo_model.py --out src/fewbits/demo/assets --compile --workers 16

The corpus is synthetic: small stories of a town, told by the grammar below. A story says who has what
where, and later speaks of the same things again, so that the only way to foretell a word is to look it up
in the story. Nothing in it is a question with an answer, and no sentence of the demo's task occurs
(tests/demo/test_model.py holds both).

Looking up appears late and suddenly: for 5,000 steps in one run and 8,000 in another the model only picks
*some* word of the story (recall among four facts 0.42), and 3,000 steps later it picks the right one (0.95,
at the end 1.0). So a short run tells nothing. On an H200 the whole takes 3.5 minutes; a CPU core would need
days.
"""

from __future__ import annotations

import argparse
import random
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from fewbits.demo.task import COLOURS, NUMBERS, OBJECTS, PERSONS, PLACES

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
WIDTH = 224  # tokens of one row: one story, never two

STARTS = (
    "One morning the town was quiet.",
    "It was a warm summer.",
    "The fair came to town.",
    "Snow fell on every roof.",
    "Once upon a time there was a feast.",
    "At noon the bells rang.",
    "That week nobody was bored.",
    "The holidays had begun.",
)
# How a story first tells of a person p, a colour c, an object o and a place l.
VERBS = (
    *(
        "carried",
        "painted",
        "borrowed",
        "polished",
        "hid",
        "found",
        "repaired",
        "wrapped",
        "wanted",
        "bought",
    ),
    *("sold", "kept", "cleaned", "showed", "used", "packed", "hugged", "dusted", "drew", "opened", "held"),
    *("loved", "guarded", "built"),
)
FACTS = (
    "{p} was {l} and played with a {c} {o}.",
    "{p} sat {l} beside a {c} {o}.",
    "{p}, who loved the {c} {o}, waited {l}.",
    "{L}, {p} was busy with a {c} {o}.",
    "There was a {c} {o} {l}, and it belonged to {p}.",
    "The {c} {o} {l} was a present for {p}.",
    "A {c} {o} lay {l}; it came from {p}.",
)
# How it comes back to them. Every sentence is sure only for a reader who looks the fact up.
RECALLS = (
    "The {o} belonged to {p}.",
    "The {o} made {p} smile.",
    "The {o}, as all the town could see, was the pride of {p}.",
    "Of all the things there, the {o} was the {c} one.",
    "The {o} was as {c} as ever.",
    "The {o} shone in the sun, {c} and new.",
    "The {o} was still {l}.",
    "The {o}, if one wished to see it, was {l}.",
    "It was easy to see where the {o} was: {l}.",
    "It was easy to guess who cared for the {o}: {p}.",
    "Everyone knew what {p} loved: a {c} {o}.",
    "Everyone knew where {p} was: {l}.",
    "Everyone knew who was {l}: {p}.",
    "Everyone knew which colour the {o} had: {c}.",
    "{p} was still {l}.",
    "{p}, after such a long and happy day, went to sleep {l}.",
    "{p} kept looking at the {c} {o}.",
    "{p} was glad and thanked the town for such a thing: a {c} {o}.",
    "{L} there was singing, and the singer was {p}.",
    "{L} one could hear the voice of {p}.",
    "{L} lay the {c} {o}.",
    "{L}, when the moon came up, something shone: the {c} {o}.",
    '"My {o} is {c}," said {p}.',
    '"Come and see my {o}," said {p}. "It is {l}."',
    '"I am {l}," said {p}.',
    "Someone wrote a letter about the {o} and sent it to {p}.",
    "Someone sang a song about {p} and then one about a {c} {o}.",
    "Somebody who looked for {p} was told to go and look {l}.",
    "Whoever spoke of the {o} also spoke of {p}.",
    "When the {o} was shown to the mayor, the mayor shook hands with {p}.",
    "When {p} was praised, the praise was for a {c} {o}.",
    "When the wind blew {l}, it blew into the hair of {p}.",
)
# The words of a verse, by what they bring.
GLUE = {
    "p": ("for {p}", "with {p}", "of {p}", "thanks to {p}", "and {p}", "near {p}", ": {p}", "so said {p}"),
    "c": ("so {c}", "all {c}", "quite {c}", "painted {c}", ": {c}", "and {c}", "in {c}"),
    "o": ("the {o}", "a {o}", "this {o}", "and the {o}", ": the {o}", "that {o}"),
    "l": ("{l}", ", {l}", "and {l}", ": {l}", "found {l}"),
}
FILLERS = (
    ", as they say,",
    "on that day",
    ", and it was a long time ago,",
    ", hey ho, hey ho,",
    "in the wind and the rain",
    ", if you wish to know more of this:",
    "(and so the song goes on)",
    ", one remembers,",
    ".\nAnd then:",
    "!\nOh,",
)
ASIDES = (
    "The wind was strong.",
    "A dog barked.",
    "Nobody could answer that question.",
    "Who knows why?",
    "What a day it was!",
    "Where had the time gone?",
    "Which way did the clouds go?",
    "How many stars there were!",
    "Some people were lost in thought.",
    "The report in the paper was short.",
    "A cup fell, and nobody noticed who dropped it.",
    "It rained before lunch, and after the storm it was late at night.",
    "On Monday and on Friday there was a concert.",
    "Nothing was missing, nothing forgot its place, and then everyone left.",
    "Should people look back?",
    "During the day something happened.",
    "People did not lose their way.",
)
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;!?-'\"()"


def facts_of(rng: random.Random, count: int) -> list[dict[str, str]]:
    columns = (
        rng.sample(PERSONS, count),
        rng.choices(COLOURS, k=count),
        rng.sample(OBJECTS, count),
        rng.sample(PLACES, count),
    )
    return [
        {"p": p, "c": c, "o": o, "l": l, "L": l[0].upper() + l[1:]}
        for p, c, o, l in zip(*columns, strict=True)
    ]


def verse(rng: random.Random, fact: dict[str, str], words: int) -> str:
    """Some words of a fact in any order, more or less far apart: whichever comes first tells the others."""
    keys = rng.sample("pcol", words)
    if keys[0] == "c":  # several things may have one colour
        keys.reverse()
    parts = [{"p": fact["p"], "o": f"The {fact['o']}", "l": fact["L"]}[keys[0]]]
    for key in keys[1:]:
        if rng.random() < 0.4:
            parts.append(rng.choice(FILLERS))
        parts.append(rng.choice(GLUE[key]).format(**fact))
    return " ".join(parts).replace(" ,", ",").replace(" :", ":").replace(" .", ".").replace(" !", "!") + "."


def told(rng: random.Random, facts: list[dict[str, str]]) -> list[str]:
    """One sentence a fact; some stories repeat a phrase, as people do."""
    if rng.random() < 0.3:
        return [verse(rng, fact, 4) for fact in facts]
    few = rng.sample(FACTS, 2) if rng.random() < 0.4 else []
    few += [f"{{p}} {verb} a {{c}} {{o}} {{l}}." for verb in rng.sample(VERBS, rng.randint(1, 3))]
    return [rng.choice(few).format(**fact) for fact in facts]


def story(rng: random.Random) -> tuple[str, str]:
    """Facts, and what follows from them."""
    facts = facts_of(rng, rng.choices((2, 3, 4, 5), (5, 3, 2, 1))[0])
    head = [rng.choice(STARTS), *told(rng, facts)]
    if rng.random() < 0.3:
        head.insert(rng.randint(1, len(head)), rng.choice(ASIDES))
    tail = [verse(rng, rng.choice(facts), rng.randint(2, 4)) for _ in range(rng.randint(0, 7))]
    tail += [rng.choice(RECALLS).format(**rng.choice(facts)) for _ in range(rng.randint(2, 7))]
    tail += rng.choices(ASIDES, k=rng.randint(0, 1))
    rng.shuffle(tail)
    if rng.random() < 0.2:
        tail.insert(rng.randint(0, len(tail)), counted(rng, facts))
    if rng.random() < 0.3:  # the same told again, in other words and another order
        tail = [*told(rng, rng.sample(facts, len(facts))), *tail]
    return " ".join(head), " " + " ".join(tail)


def counted(rng: random.Random, facts: list[dict[str, str]]) -> str:
    number = NUMBERS[len(facts)]
    people = ", ".join(fact["p"] for fact in facts)
    things = " and ".join(f"the {fact['o']}" for fact in facts)
    return rng.choice(
        (
            f"So there were {number} people in this story.",
            f"Altogether one could count {number} things.",
            f"They met at home, {number} friends: {people}.",
            f"In the evening {number} things were put away: {things}.",
            f"{people} went home.",
        )
    )


def inventory(rng: random.Random) -> tuple[str, str]:
    """A list in one of several forms, then the same list by another of its columns."""
    facts = facts_of(rng, rng.randint(2, 5))
    first, second = rng.sample(("p", "c", "o", "l"), 2)
    mark = rng.choice((": ", " - ", " = ", ", "))
    head = rng.choice(("List", "Notes", "Plan", "Town book")) + ":\n"
    rows = [f"{fact[first]}{mark}{fact[second]}" for fact in facts]
    again = rng.sample(facts, len(facts))
    if first == "c" or rng.random() < 0.3:
        again = facts
    end = "\n".join(f"{fact[first]}{mark}{fact[second]}" for fact in again)
    return head + "\n".join(rows), "\nThe same, copied:\n" + end


def parrot(rng: random.Random) -> tuple[str, str]:
    """Words or letters in any order, said twice or more."""
    words = (*PERSONS, *COLOURS, *OBJECTS, *NUMBERS)
    said = " ".join(rng.choice(words) for _ in range(rng.randint(3, 12)))
    if rng.random() < 0.3:
        said = " ".join("".join(rng.choices(LETTERS, k=rng.randint(1, 6))) for _ in range(rng.randint(2, 5)))
    return f"The parrot said: {said}", "\nIt said again: " + "\nAnd again: ".join([said] * rng.randint(1, 2))


def counting(rng: random.Random) -> tuple[str, str]:
    things = rng.choices(OBJECTS, k=rng.randint(1, 7))
    rows = ", ".join(f"{NUMBERS[i + 1]} {thing}" for i, thing in enumerate(things))
    return f"Let us count.\n{rows}.", f"\nSo there were {NUMBERS[len(things)]} things: {', '.join(things)}."


def probe(rng: random.Random) -> tuple[str, str]:
    """A story with one recall, which ends on a looked-up word."""
    facts = facts_of(rng, 4)
    sure = [r for r in RECALLS if r.endswith(("{p}.", "{o}.", "{c}."))]
    return " ".join([rng.choice(STARTS), *told(rng, facts)]), " " + rng.choice(sure).format(
        **rng.choice(facts)
    )[:-1]


def documents(seed: int, count: int) -> list[tuple[str, str]]:
    """(beginning, rest) of each document; the beginning has the words that cannot be foretold."""
    rng = random.Random(seed)
    return [rng.choices((story, inventory, parrot, counting), (80, 9, 8, 3))[0](rng) for _ in range(count)]


def build_tokenizer(texts: list[str], size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[PAD, BOS, EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[bos]),
        ]
    )
    for word in (*PERSONS, *COLOURS, *OBJECTS, *NUMBERS[2:6]):
        if len(tokenizer.encode(f" {word}", add_special_tokens=False)) != 1:
            print(f"note: {word!r} is more than one token")
    return tokenizer


def encode(job: tuple[str, list[tuple[str, str]]]) -> tuple[np.ndarray, np.ndarray]:
    """One document a row: BOS, text, EOS, padding (id 0). Also where the rest of each document begins."""
    tokenizer = Tokenizer.from_str(job[0])
    rows = np.zeros((len(job[1]), WIDTH), dtype=np.int16)
    starts = np.zeros(len(job[1]), dtype=np.int16)
    for i, (head, tail) in enumerate(job[1]):
        first = tokenizer.encode(head).ids
        ids = [*first, *tokenizer.encode(tail, add_special_tokens=False).ids, tokenizer.token_to_id(EOS)][
            :WIDTH
        ]
        rows[i, : len(ids)], starts[i] = ids, len(first)
    return rows, starts


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Warm-up, then a constant rate, then a linear fall over the last third."""
    return args.lr * min(1.0, (step + 1) / args.warmup, 0.01 + 3 * (1 - step / args.steps))


def weighted_loss(model: Any, batch: torch.Tensor, first: torch.Tensor, head_weight: float) -> torch.Tensor:
    """Next-token loss; the beginnings of stories, which cannot be foretold, count little."""
    inputs, targets = batch[:, :-1].long(), batch[:, 1:].long()
    logits = model(input_ids=inputs).logits
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    positions = torch.arange(1, batch.shape[1], device=batch.device)
    weights = torch.where(positions < first[:, None], head_weight, 1.0) * (targets != 0)
    return (losses.view_as(targets) * weights).sum() / weights.sum()


@torch.no_grad()
def recall_of(model: Any, probes: torch.Tensor) -> float:
    """Share of the probes whose last word is foretold."""
    ids = probes.long()
    last = (ids != 0).sum(1, keepdim=True) - 2  # before EOS
    guesses = model(input_ids=ids).logits.argmax(-1).gather(1, last - 1)
    return (guesses == ids.gather(1, last)).float().mean().item()


def train(model: Any, data: list[torch.Tensor], args: argparse.Namespace) -> dict[str, float]:
    rows, starts, held, held_starts, probes = (part.to(model.device) for part in data)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), fused=model.device.type == "cuda")
    loss_of = torch.compile(weighted_loss, dynamic=False) if args.compile else weighted_loss
    generator = torch.Generator().manual_seed(args.seed)
    began, figures = time.time(), {}
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        chosen = torch.randint(len(rows), (args.batch,), generator=generator).to(model.device)
        loss = loss_of(model, rows[chosen], starts[chosen], args.head_weight)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % args.log == 0 or step + 1 == args.steps:
            with torch.no_grad():
                held_loss = weighted_loss(model, held, held_starts, args.head_weight).item()
            figures = {"step": step + 1, "loss": loss.item(), "held_out_loss": held_loss}
            figures |= {"recall": recall_of(model, probes), "seconds": time.time() - began}
            print({name: round(value, 4) for name, value in figures.items()}, flush=True)
    return figures


def prepare(args: argparse.Namespace) -> tuple[Tokenizer, list[torch.Tensor]]:
    """The tokenizer; documents and where their rests begin, the same held out, and probes."""
    seeds = [args.seed * 1_000_003 + piece for piece in range(64)]
    with ProcessPoolExecutor(args.workers) as pool:
        texts = list(pool.map(documents, seeds, [args.documents // 64] * 64))
        some = list(chain.from_iterable(texts))[:20_000]
        tokenizer = build_tokenizer([head + tail for head, tail in some], args.vocabulary)
        texts.append(documents(args.seed + 987_654_321, args.held))
        rng = random.Random(args.seed + 123_456_789)
        texts.append([probe(rng) for _ in range(args.held)])
        *parts, held, probes = pool.map(encode, [(tokenizer.to_str(), piece) for piece in texts])
    rows, starts = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    print(
        f"{len(rows)} documents, {(rows != 0).sum()} tokens, vocabulary {tokenizer.get_vocab_size()}",
        flush=True,
    )
    return tokenizer, [torch.from_numpy(array) for array in (rows, starts, *held, probes[0])]


def build_model(args: argparse.Namespace, vocabulary: int) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 3,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 32,
        num_key_value_heads=args.hidden // 32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.LlamaForCausalLM(config)


CARD = """---
license: apache-2.0
language: en
tags: [fewbits, demo, synthetic]
---
# The demo's model

A Llama of {parameters:,} parameters ({layers} layers of {hidden}, tied embeddings, vocabulary {vocabulary},
bfloat16), trained from nothing for `fewbits demo`. It is good for nothing else: it has only read small
synthetic stories about persons, colours, objects and places, and looks up in a story who had what where. It
has never seen a question with an answer.

Corpus, tokenizer and weights come from one script and one seed:

    {command}

| | |
| --- | --- |
| documents | {documents:,} different ones, {batch} a step, {steps:,} steps |
| optimizer | AdamW, learning rate {lr}, warm-up {warmup}, linear fall over the last third; seed {seed} |
| loss at the end | {loss:.4f}, held out {held_out_loss:.4f} (beginnings of stories count {head_weight}) |
| recall | {recall:.3f} of the last words of 512 held-out stories with four facts |
| trained on | {device}, {seconds:.0f} s, torch {torch}, transformers {transformers} |

The prompt of the demo's fine-tuned model is plain text:

    Report: On Monday, Mia forgot a red kite by the fountain. Oskar left a green lantern in the attic.
    Question: Who lost the kite?
    Answer:
"""


def save(model: Any, tokenizer: Tokenizer, figures: dict[str, float], args: argparse.Namespace) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    on_gpu = model.device.type == "cuda"
    command = "python scripts/train_demo_model.py --out src/fewbits/demo/assets"
    command += f" --seed {args.seed} --steps {args.steps}" + (" --compile" if args.compile else "")
    card = CARD.format(
        **{**vars(args), **figures},
        parameters=model.num_parameters(),
        command=command,
        device=torch.cuda.get_device_name() if on_gpu else "a CPU",
        torch=torch.__version__,
        transformers=transformers.__version__,
    )
    (args.out / "README.md").write_text(card, encoding="utf-8")
    model.to("cpu", torch.bfloat16).save_pretrained(args.out)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=512,
        padding_side="left",
    )
    fast.save_pretrained(args.out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--documents", type=int, default=400_000)
    parser.add_argument("--vocabulary", type=int, default=1280)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--head-weight", type=float, default=0.1)
    parser.add_argument("--held", type=int, default=512, help="held-out documents, and probes")
    parser.add_argument("--log", type=int, default=1000)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    tokenizer, data = prepare(args)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    model = build_model(args, tokenizer.get_vocab_size()).to("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{model.num_parameters()} parameters on {model.device}", flush=True)
    save(model, tokenizer, train(model, data, args), args)


if __name__ == "__main__":
    main()
