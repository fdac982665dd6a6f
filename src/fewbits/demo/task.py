"""The demo's task: the lost-property desk of a small town, reading comprehension that we generate.

A report tells who lost which thing where; a question asks for one of these facts::

    Report: On Monday, Mia forgot a red kite by the fountain. Oskar left a green lantern in the attic.
    Question: Who is missing a lantern?
    Answer: Oskar

Held out by content: for every seed the pairs person-object, object-place and colour-object are split in two,
and the two halves never meet. A fact of a test report is made of held-out pairs only, a fact of a training
report of the others only: no question, no report and not even two words of a fact can be known from training.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product

from fewbits.errors import BadInput

PERSONS = (
    *("Mia", "Oskar", "Lena", "Tom", "Aiko", "Ravi", "Nora", "Hugo", "Zoe", "Emil", "Ines", "Kofi", "Lara"),
    *("Mateo", "Ada", "Felix", "Yara", "Otto", "Priya", "Sami", "Clara", "Bruno", "Elif", "Jonas", "Luna"),
    *("Omar", "Rosa", "Theo", "Vera", "Kai", "Maya", "Leo", "Anya", "Pablo", "Greta", "Amir", "Nina", "Hana"),
    *("Igor", "Ruth"),
)
COLOURS = (
    *("red", "blue", "green", "yellow", "purple", "golden", "silver", "white", "black", "brown", "pink"),
    "grey",
)
OBJECTS = (
    *("kite", "drum", "lantern", "kettle", "teapot", "violin", "bicycle", "compass", "telescope", "scarf"),
    *(
        "hat",
        "boat",
        "balloon",
        "basket",
        "bell",
        "book",
        "candle",
        "clock",
        "cup",
        "feather",
        "flag",
        "flute",
    ),
    *("guitar", "key", "ladder", "lamp", "map", "mask", "mirror", "pillow", "puppet", "ribbon", "robot"),
    *("rocket", "shell", "spoon", "suitcase", "trumpet", "whistle", "wagon"),
)
PLACES = (
    *(
        "at the harbour",
        "at the market",
        "at the station",
        "at the school",
        "at the castle",
        "at the theatre",
    ),
    *("in the attic", "in the garden", "in the library", "in the cellar", "in the tower", "in the forest"),
    *("in the kitchen", "in the museum", "in the orchard", "in the cave", "in the greenhouse", "on the hill"),
    *(
        "on the roof",
        "on the balcony",
        "on the beach",
        "on the island",
        "under the bridge",
        "under the stairs",
    ),
    *(
        "by the fountain",
        "by the river",
        "by the well",
        "near the lighthouse",
        "near the windmill",
        "near the zoo",
    ),
    *("behind the bakery", "behind the barn"),
)
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

HELD_OUT_SHARE = 0.25

_OPENINGS = (
    "On Monday",
    "On Friday",
    "Before lunch",
    "After the concert",
    "During the storm",
    "Late at night",
)
_FACTS = (
    "{person} forgot a {colour} {object} {place}.",
    "{person} left a {colour} {object} {place}.",
    "{person} dropped a {colour} {object} {place}.",
    "{person} lost a {colour} {object} {place}.",
)
_ASIDES = ("It rained all day.", "The town was busy.", "Nobody noticed.", "Then the bells rang.")
_QUESTIONS = {
    "owner": ("Who is missing a {object}?", "Who lost the {object}?"),
    "visitor": ("Who was {place}?", "Who should go back and look {place}?"),
    "place": ("Where is the {object}?", "Where did someone lose a {object}?"),
    "search": ("Where should {person} look?", "Where was {person}?"),
    "thing": ("What did {person} lose?", "What is {person} missing?"),
    "colour": ("What colour is the {object}?", "Which colour has the {object}?"),
    "count": ("How many things were lost?", "How many people lost something?"),
}
KINDS = tuple(_QUESTIONS)


@dataclass(frozen=True)
class Fact:
    """One line of a report: a person lost an object of a colour at a place."""

    person: str
    colour: str
    object: str
    place: str

    @property
    def pairs(self) -> frozenset[tuple[str, str]]:
        """The pairs of entities by which training and test are kept apart."""
        return frozenset(((self.person, self.object), (self.object, self.place), (self.colour, self.object)))


@dataclass(frozen=True)
class Question:
    """A report with one question about it, and the answer."""

    kind: str
    report: str
    question: str
    answer: str
    facts: tuple[Fact, ...]

    @property
    def prompt(self) -> str:
        """What the model reads; its answer follows after a space."""
        return f"Report: {self.report}\nQuestion: {self.question}\nAnswer:"

    @property
    def row(self) -> dict[str, str]:
        """The prompt-completion row of a training file."""
        return {"prompt": self.prompt, "completion": f" {self.answer}"}


def split_pairs(rng: random.Random) -> tuple[frozenset[tuple[str, str]], frozenset[tuple[str, str]]]:
    """Splits the pairs of entities into those for training and those held out, object by object."""
    train: set[tuple[str, str]] = set()
    held_out: set[tuple[str, str]] = set()
    for thing in OBJECTS:
        for others, object_first in ((PERSONS, False), (COLOURS, False), (PLACES, True)):
            shuffled = rng.sample(others, len(others))
            num_held_out = round(HELD_OUT_SHARE * len(others))
            for i, other in enumerate(shuffled):
                pair = (thing, other) if object_first else (other, thing)
                (held_out if i < num_held_out else train).add(pair)
    return frozenset(train), frozenset(held_out)


class Questioner:
    """Makes questions whose facts consist of the allowed pairs only."""

    def __init__(self, allowed: frozenset[tuple[str, str]], rng: random.Random) -> None:
        self.rng = rng
        self.persons = {o: [p for p in PERSONS if (p, o) in allowed] for o in OBJECTS}
        self.colours = {o: [c for c in COLOURS if (c, o) in allowed] for o in OBJECTS}
        self.places = {o: [p for p in PLACES if (o, p) in allowed] for o in OBJECTS}

    def facts(self, count: int) -> tuple[Fact, ...]:
        """Facts with distinct persons, objects and places; colours may repeat."""
        facts: list[Fact] = []
        while len(facts) < count:
            thing = self.rng.choice(OBJECTS)
            fact = Fact(
                self.rng.choice(self.persons[thing]),
                self.rng.choice(self.colours[thing]),
                thing,
                self.rng.choice(self.places[thing]),
            )
            if all(fact.person != f.person and thing != f.object and fact.place != f.place for f in facts):
                facts.append(fact)
        return tuple(facts)

    def question(self, kind: str) -> Question:
        """One question of a kind about a report of two to four facts."""
        rng = self.rng
        facts = self.facts(rng.randint(2, 4))
        sentences = [rng.choice(_FACTS).format(**vars(fact)) for fact in facts]
        sentences[0] = f"{rng.choice(_OPENINGS)}, {sentences[0]}"
        if rng.random() < 0.5:
            sentences.insert(rng.randint(1, len(sentences)), rng.choice(_ASIDES))
        subject = rng.choice(facts)
        answers = {
            "owner": subject.person,
            "visitor": subject.person,
            "place": subject.place,
            "search": subject.place,
            "thing": f"a {subject.colour} {subject.object}",
            "colour": subject.colour,
            "count": NUMBERS[len(facts)],
        }
        question = rng.choice(_QUESTIONS[kind]).format(**vars(subject))
        return Question(kind, " ".join(sentences), question, answers[kind], facts)


@dataclass(frozen=True)
class Task:
    """Questions to train on and questions to be tested with."""

    seed: int
    train: tuple[Question, ...]
    test: tuple[Question, ...]


def make_task(seed: int, *, num_train: int, num_test: int) -> Task:
    """Generates the task of a seed, and checks that test and training have no pair of entities in common."""
    if num_train < len(KINDS) or num_test < len(KINDS):
        raise BadInput(
            f"A task needs at least one question of each kind, {len(KINDS)} for training and for the test; "
            f"{num_train} and {num_test} were asked for."
        )
    rng = random.Random(seed)
    allowed, held_out = split_pairs(rng)
    train = _questions(Questioner(allowed, rng), num_train)
    test = _questions(Questioner(held_out, rng), num_test)
    check_held_out(train, test)
    return Task(seed, train, test)


def _questions(questioner: Questioner, count: int) -> tuple[Question, ...]:
    """Different questions, the kinds taking turns."""
    by_text: dict[str, Question] = {}
    while len(by_text) < count:
        question = questioner.question(KINDS[len(by_text) % len(KINDS)])
        by_text.setdefault(question.prompt, question)
    return tuple(by_text.values())


def check_held_out(train: tuple[Question, ...], test: tuple[Question, ...]) -> None:
    """Raises BadInput if a pair of entities of a test report occurs in a training report."""
    trained = {pair for question in train for fact in question.facts for pair in fact.pairs}
    tested = {pair for question in test for fact in question.facts for pair in fact.pairs}
    if shared := sorted(trained & tested):
        raise BadInput(f"The test is not held out: {len(shared)} pairs are in both, such as {shared[0]}.")


def every_pair() -> frozenset[tuple[str, str]]:
    """All pairs that a split divides."""
    return frozenset((*product(PERSONS, OBJECTS), *product(COLOURS, OBJECTS), *product(OBJECTS, PLACES)))
