"""Files of prices: what they hold, how two are put together, what is refused."""

from __future__ import annotations

import pytest

from fewbits.errors import BadInput
from fewbits.recipes.energy_prices import (
    PUBLISHED,
    Prices,
    prices_from_plain,
    prices_to_plain,
    read_prices,
    write_prices,
)


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("ending", ["yaml", "json"])
def test_published_cells_survive_a_file(name, ending, tmp_path):
    cell = read_prices(name)
    assert cell.source and cell.notes and prices_from_plain(prices_to_plain(cell)) == cell
    write_prices(cell, tmp_path / f"cell.{ending}")
    assert read_prices(tmp_path / f"cell.{ending}") == cell


def test_a_second_file_fills_in_what_the_first_lacks():
    mine = Prices(name="mine", source="here", sc_cycle=0.002, int_mac={4: 0.05}, rows=64)
    filled = mine.filled_from(PUBLISHED["jouppi-7nm"])
    assert (filled.sc_cycle, filled.quantize, filled.rows) == (0.002, 1.31, 64)
    assert dict(filled.int_mac) == {4: 0.05, 8: 0.1, 32: 1.51}
    assert filled.name == "mine + jouppi-7nm" and "Jouppi" in filled.source
    assert filled.filled_from(mine) is filled


def test_an_unknown_price_is_not_zero():
    with pytest.raises(BadInput, match="no price for sc_cycle, which this model needs"):
        PUBLISHED["tubgemm-5nm"].of("sc_cycle")
    with pytest.raises(BadInput, match=r"int_mac of 5 bits \(it has 8, 32\)"):
        PUBLISHED["horowitz-45nm"].of_bits("int_mac", 5)
    assert PUBLISHED["ds-cim2"].of("sc_cycle") == 0


def test_mistakes_in_a_file(tmp_path):
    for text, sentence in {
        "picojoules: {sc_cycle: 1}": "lacks the field fewbits_energy",
        "fewbits_energy: 2": "version 2 and this fewbits reads 1",
        "{fewbits_energy: 1, picojoules: {sc_cycl: 1}}": "unknown field sc_cycl; known: sc_cycle",
        "{fewbits_energy: 1, picojoules: {sc_cycle: -1}}": "sc_cycle=-1 is no price",
        "{fewbits_energy: 1, picojoules: {sc_cycle: .nan}}": "sc_cycle=nan is no price",
        "{fewbits_energy: 1, picojoules: {int_mac: {eight: 1}}}": "int_mac names 'eight' bits",
        "{fewbits_energy: 1, picojoules: {int_mac: 1}}": "int_mac must be a mapping",
        "{fewbits_energy: 1, array: {rows: 0}}": "array rows=0 is refused",
        "{fewbits_energy: 1": "cannot be read",
    }.items():
        (tmp_path / "cell.yaml").write_text(text)
        with pytest.raises(BadInput, match=sentence):
            read_prices(tmp_path / "cell.yaml")
    with pytest.raises(BadInput, match=r"no file of prices .*absent, nor a published cell"):
        read_prices(tmp_path / "absent")
