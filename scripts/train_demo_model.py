"""Trains the tiny Llama that `fewbits demo` ships, from nothing: corpus, tokenizer, weights, model card.

    python scripts/train_demo_model.py --out src/fewbits/demo/assets

The corpus is synthetic: small stories of a town, told by the grammar below. A story says who has what where, and later
speaks of the same things again, so that the only way to foretell a word is to look it up in the story. Nothing in it is
a question with an answer, and none of the demo's own sentences occurs (tests/demo/test_assets.py holds both).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import tokenizers
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
    "carried painted borrowed polished hid found repaired wrapped wanted bought sold kept cleaned "
    "showed used packed hugged dusted drew opened held loved guarded built"
).split()
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
    """Some words of a fact in any order, with more or less between them: whichever comes first tells the others."""
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
    """One document a row: BOS, text, EOS, then padding (id 0). Also where the rest of each document begins."""
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


def learning_rate(step: int, passed: float, args: argparse.Namespace) -> float:
    """Warm-up, then a constant rate, then a linear fall over the last third."""
    return args.lr * min(1.0, (step + 1) / args.warmup, 0.01 + 3 * max(0.0, 1 - passed))


def train(model: torch.nn.Module, data: list[torch.Tensor], args: argparse.Namespace) -> dict[str, float]:
    device = next(model.parameters()).device
    rows, starts, held, held_starts, probes = (part.to(device) for part in data)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), fused=device.type == "cuda")
    generator = torch.Generator().manual_seed(args.seed)
    began, figures = time.time(), {}

    def logits_of(ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids).logits

    def loss_of(batch: torch.Tensor, first: torch.Tensor, head_weight: float) -> torch.Tensor:
        ids = batch.long()
        logits, targets = logits_of(ids[:, :-1]), ids[:, 1:]
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        losses = losses.view_as(targets)
        positions = torch.arange(1, ids.shape[1], device=device)
        weights = torch.where(positions < first[:, None], head_weight, 1.0) * (targets != 0)
        return (losses * weights).sum() / weights.sum()

    fast_loss_of = torch.compile(loss_of, dynamic=False) if args.compile else loss_of
    for step in range(args.steps):
        passed = (time.time() - began) / args.seconds
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, max(passed, step / args.steps), args)
        if passed > 1:
            break
        chosen = torch.randint(len(rows), (args.batch,), generator=generator).to(device)
        loss = fast_loss_of(rows[chosen], starts[chosen], args.head_weight)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % args.log == args.log - 1:
            with torch.no_grad():
                held_loss = loss_of(held, held_starts, args.head_weight)
                last = (probes != 0).sum(1) - 2  # before EOS
                guesses = logits_of(probes.long()).argmax(-1).gather(1, (last - 1)[:, None])
                recall = (guesses == probes.long().gather(1, last[:, None])).float().mean()
            figures = {
                "step": step + 1,
                "loss": loss.item(),
                "held_out_loss": held_loss.item(),
                "recall": recall.item(),
            }
            print({k: round(v, 4) for k, v in figures.items()}, f"{time.time() - began:.0f} s", flush=True)
    return {**figures, "seconds": round(time.time() - began)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--documents", type=int, default=600_000)
    parser.add_argument("--vocabulary", type=int, default=1280)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--log", type=int, default=250)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--held", type=int, default=512)
    parser.add_argument("--head-weight", type=float, default=0.1)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--init", type=float, default=0.02)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")

    pieces = 64
    seeds = [args.seed * 1_000_003 + piece for piece in range(pieces)]
    with ProcessPoolExecutor(args.workers) as pool:
        texts = list(pool.map(documents, seeds, [args.documents // pieces] * pieces))
        tokenizer = build_tokenizer(["".join(text) for text in sum(texts, [])[:20_000]], args.vocabulary)
        texts.append(documents(args.seed + 987_654_321, args.held))
        rng = random.Random(args.seed + 123_456_789)
        texts.append([probe(rng) for _ in range(args.held)])
        *parts, held, probes = pool.map(encode, [(tokenizer.to_str(), piece) for piece in texts])
    rows, starts = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    data = [torch.from_numpy(array) for array in (rows, starts, *held, probes[0])]
    print(
        f"{len(rows)} documents, {(rows != 0).sum()} tokens, vocabulary {tokenizer.get_vocab_size()}",
        flush=True,
    )

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 3,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=args.init,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config).to(device)
    print(f"{model.num_parameters()} parameters on {device}", flush=True)
    figures = train(model, data, args)
    save(model, tokenizer, figures, args)


def save(
    model: transformers.PreTrainedModel,
    tokenizer: Tokenizer,
    figures: dict[str, float],
    args: argparse.Namespace,
) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
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


if __name__ == "__main__":
    main()
