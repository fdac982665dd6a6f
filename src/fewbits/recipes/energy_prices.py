"""What an operation costs on some hardware, in picojoules: one value, one YAML or JSON file.

    fewbits_energy: 1
    name: horowitz-45nm
    source: M. Horowitz, Computing's energy problem, ISSCC 2014, figure 1.1.9
    picojoules: {sc_cycle: 0.03, stream_bit: 0.03, count: 4.6, quantize: 3.7, int_mac: {8: 0.3},
                 float_mac: {16: 1.5, 32: 4.6}, near_byte: 2.5, far_byte: 162.5}
    array: {rows: 128, columns: 128}
    notes: {sc_cycle: "an 8-bit addition, which bounds a counter's step from above"}

A price that a file leaves out is unknown, which is not zero: an operation that needs it is refused, and a
second file may fill it in (`Prices.filled_from`). What is counted under each name is the matter of
`fewbits.inference.stochastic.work`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fewbits.errors import BadInput
from fewbits.recipes.plain_files import read_plain, write_plain

VERSION = 1
SINGLE = ("sc_cycle", "sc_product", "stream_bit", "count", "quantize", "near_byte", "far_byte")
BY_BITS = ("int_mac", "float_mac")


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Energies of single operations, in picojoules; None: unknown.

    Attributes:
        name: for readers.
        source: where the figures come from.
        sc_cycle: one step of one product's streams: the gate, and the product's share of the counter.
        sc_product: what a product costs besides, however long its streams are; left out: nothing.
        stream_bit: one bit of one operand's stream: the comparison, and its share of the sequence.
        count: a finished count made a number again: scaled, and added to those of the other chunks.
        quantize: one value made a code.
        int_mac: by the bits of its operands, one product of whole numbers, and its addition.
        float_mac: by the bits of its operands, one product of floating-point numbers, and its addition.
        near_byte: one byte from or to the memory beside the array.
        far_byte: one byte from the memory where weights, keys and values lie.
        rows: input rows that share an operand's stream, or its way from the near memory, in the array.
        columns: outputs that share an input's.
        notes: by the name of a price, how it follows from the source.
    """

    name: str = "prices"
    source: str = ""
    sc_cycle: float | None = None
    sc_product: float | None = None
    stream_bit: float | None = None
    count: float | None = None
    quantize: float | None = None
    int_mac: Mapping[int, float] = field(default_factory=dict)
    float_mac: Mapping[int, float] = field(default_factory=dict)
    near_byte: float | None = None
    far_byte: float | None = None
    rows: int = 128
    columns: int = 128
    notes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in SINGLE:
            if getattr(self, name) is not None:
                _price(name, getattr(self, name))
        for name in BY_BITS:
            for bits, value in getattr(self, name).items():
                _price(f"{name} of {bits} bits", value)
        for name in ("rows", "columns"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise BadInput(f"array {name}={value!r} is refused: give a whole number of at least 1.")

    def filled_from(self, other: Prices) -> Prices:
        """These prices, and those of ``other`` where these are unknown; the array stays this one's."""
        borrowed: dict[str, Any] = {
            name: getattr(other, name)
            for name in SINGLE
            if getattr(self, name) is None and getattr(other, name) is not None
        }
        for name in BY_BITS:
            merged = {**getattr(other, name), **getattr(self, name)}
            if merged != dict(getattr(self, name)):
                borrowed[name] = merged
        if not borrowed:
            return self
        return replace(
            self,
            **borrowed,
            name=f"{self.name} + {other.name}",
            source=f"{self.source}; {other.source}".strip("; "),
            notes={**other.notes, **self.notes},
        )

    def of(self, name: str) -> float:
        """The price with this name.

        Raises:
            BadInput: it is unknown.
        """
        value: float | None = getattr(self, name)
        if value is None:
            raise BadInput(
                f"{self.name} has no price for {name}, which this model needs; add it to the file (0 where "
                "another price holds it already), or name a second file that has it."
            )
        return value

    def of_bits(self, name: str, bits: int) -> float:
        """The price of a multiplication ("int_mac", "float_mac") of operands of so many bits.

        Raises:
            BadInput: it is unknown.
        """
        by_bits: Mapping[int, float] = getattr(self, name)
        if bits not in by_bits:
            widths = ", ".join(map(str, sorted(by_bits))) or "none"
            raise BadInput(
                f"{self.name} has no price for {name} of {bits} bits (it has {widths}); add it to the file, "
                "or name a second file that has it."
            )
        return by_bits[bits]


def _price(name: str, value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0:
        raise BadInput(f"{name}={value!r} is no price; give picojoules, a number of at least 0.")
    return float(value)


def prices_to_plain(prices: Prices) -> dict[str, Any]:
    """The prices as plain data, without those that are unknown."""
    named = {name: getattr(prices, name) for name in SINGLE if getattr(prices, name) is not None}
    by_bits = {name: dict(getattr(prices, name)) for name in BY_BITS if getattr(prices, name)}
    return {
        "fewbits_energy": VERSION,
        "name": prices.name,
        "source": prices.source,
        "picojoules": {**named, **by_bits},
        "array": {"rows": prices.rows, "columns": prices.columns},
        "notes": dict(prices.notes),
    }


def prices_from_plain(plain: Any) -> Prices:
    """The inverse of `prices_to_plain`.

    Raises:
        BadInput: an unknown field, or a value that is no price.
    """
    if not isinstance(plain, Mapping) or "fewbits_energy" not in plain:
        raise BadInput(
            "this is no file of prices: it lacks the field fewbits_energy; write one as the guide shows, or "
            f"name one of {', '.join(PUBLISHED)}."
        )
    if plain["fewbits_energy"] != VERSION:
        raise BadInput(
            f"the file of prices has version {plain['fewbits_energy']!r} and this fewbits reads {VERSION}; "
            "install the fewbits that it was written for."
        )
    fields = ("fewbits_energy", "name", "source", "picojoules", "array", "notes")
    _check_known("the file of prices", plain, fields)
    parts = {name: _mapping(name, plain.get(name) or {}) for name in ("picojoules", "array", "notes")}
    _check_known("picojoules", parts["picojoules"], (*SINGLE, *BY_BITS))
    _check_known("array", parts["array"], ("rows", "columns"))
    values = dict(parts["picojoules"])
    for name in BY_BITS:
        if name in values:
            values[name] = {_bits(name, bits): v for bits, v in _mapping(name, values[name]).items()}
    array, notes = dict(parts["array"]), {str(k): str(v) for k, v in parts["notes"].items()}
    texts = {name: str(plain.get(name, "")) for name in ("name", "source")}
    return Prices(**{**texts, **values, **array, "notes": notes})


def _bits(name: str, bits: Any) -> int:
    text = str(bits)
    if not text.isdigit() or int(text) < 1:
        raise BadInput(f"{name} names {bits!r} bits; give prices by whole numbers of bits, as {{8: 0.3}}.")
    return int(text)


def _mapping(where: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise BadInput(f"{where} must be a mapping, not {value!r}.")
    return value


def _check_known(where: str, plain: Mapping[Any, Any], fields: tuple[str, ...]) -> None:
    unknown = sorted(set(map(str, plain)) - set(fields))
    if unknown:
        raise BadInput(f"{where}: unknown field {', '.join(unknown)}; known: {', '.join(fields)}.")


def read_prices(name: Path | str) -> Prices:
    """A published cell by its name in `PUBLISHED`, or a .yaml, .yml or .json file.

    Raises:
        BadInput: there is no such file, or it holds no prices.
    """
    if str(name) in PUBLISHED:
        return PUBLISHED[str(name)]
    path = Path(name)
    if not path.is_file():
        raise BadInput(
            f"there is no file of prices {path}, nor a published cell of this name; give a YAML or JSON file "
            f"or one of {', '.join(PUBLISHED)}."
        )
    return read_plain(path, prices_from_plain)


def write_prices(prices: Prices, path: Path | str) -> None:
    """Write prices as YAML, or as JSON where the name ends so."""
    write_plain(Path(path), prices_to_plain(prices))


# Cells of the literature; each note says what its source prints and what follows from that.


def _tables() -> tuple[Prices, ...]:
    """Those that print single operations."""
    step = "bounded from above by an 8-bit addition, the whole of a counter's step and of a comparison"
    multiplication = "one float32 multiplication"
    read = "one float32 multiplication and addition"
    gates = {"sc_cycle": step, "stream_bit": step, "quantize": multiplication, "count": read}
    return (
        Prices(
            name="horowitz-45nm",
            source="M. Horowitz, Computing's energy problem (and what we can do about it), ISSCC 2014",
            sc_cycle=0.03,
            stream_bit=0.03,
            count=4.6,
            quantize=3.7,
            int_mac={8: 0.3, 32: 3.2},
            float_mac={16: 1.5, 32: 4.6},
            near_byte=2.5,
            far_byte=162.5,
            notes={
                **gates,
                "int_mac": "8 bits: product 0.2, 32-bit addition 0.1; 32 bits: 3.1 and 0.1",
                "float_mac": "16 bits: 1.1 and 0.4; 32 bits: 3.7 and 0.9",
                "near_byte": "20 pJ for 64 bits of a 32 KB cache",
                "far_byte": "the lower end of 1.3 to 2.6 nJ for 64 bits of DRAM",
            },
        ),
        Prices(
            name="jouppi-7nm",
            source="N. Jouppi et al., Ten lessons from three generations shaped Google's TPUv4i, ISCA 2021, "
            "table 2",
            sc_cycle=0.007,
            stream_bit=0.007,
            count=1.69,
            quantize=1.31,
            int_mac={8: 0.1, 32: 1.51},
            float_mac={16: 0.59, 32: 1.69},
            near_byte=1.0625,
            far_byte=31.25,
            notes={
                **gates,
                "int_mac": "8 bits: product 0.07, 32-bit addition 0.03; 32 bits: 1.48 and 0.03",
                "float_mac": "16 bits: a bfloat16 product 0.21, a float32 sum 0.38; 32 bits: 1.31 and 0.38",
                "near_byte": "8.5 pJ for 64 bits of a 32 KB memory",
                "far_byte": "the lower end of 250 to 450 pJ for 64 bits of HBM2",
            },
        ),
    )


def _arrays() -> tuple[Prices, ...]:
    """Those that print whole products."""
    return (
        Prices(
            name="tubgemm-5nm",
            source="tubGEMM: energy-efficient and sparsity-effective temporal-unary-binary based matrix "
            "multiply unit, arXiv 2412.17955",
            int_mac={8: 4.225},
            rows=128,
            columns=128,
            notes={
                "int_mac": "an exact unary product: 8.86 uJ for 128 x 128 x 128 products of 8 bits without "
                "sparsity (the web page's abstract has lost the u; at its 417.72 mW nothing else is possible)"
            },
        ),
        Prices(
            name="ds-cim2",
            source="K. Shao et al., DS-CIM, arXiv 2601.06724, variant DS-CIM2",
            sc_cycle=0.0,
            sc_product=2 / 3566.1,
            stream_bit=0.0,
            count=0.0,
            notes={
                "sc_product": "3566.1 TOPS/W, two operations a product, the whole macro at its own length of "
                "streams: this price says nothing of other lengths, nor of the far memory"
            },
        ),
        Prices(
            name="zhang-28nm",
            source="X. Zhang et al., An energy-efficient mixed-signal parallel MAC engine based on "
            "stochastic computing, arXiv 1907.01807",
            sc_cycle=0.0,
            sc_product=5.03 / 26,
            stream_bit=0.0,
            count=0.0,
            notes={
                "sc_product": "5.03 pJ for 26 products and their sum, simulated, conversion included, at its "
                "own length of streams: this price says nothing of other lengths"
            },
        ),
    )


PUBLISHED = {prices.name: prices for prices in (*_tables(), *_arrays())}
