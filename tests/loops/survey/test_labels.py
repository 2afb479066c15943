"""Which columns of a list say which site it is."""

from __future__ import annotations

import pandas as pd
import pytest

from bo_stream.loops.survey.findings import shown_labels


def labels(**columns: list[object]) -> pd.DataFrame:
    return pd.DataFrame(columns)


@pytest.mark.parametrize(
    ("name", "district"),
    [
        ("name", "District"),
        ("Village name", "ADM2_NAME"),
        ("Nom du village", "Département"),
        ("Nome", "Distrito"),
        ("Nombre", "Municipio"),
    ],
)
def test_names_and_districts_are_found_in_some_languages(name: str, district: str) -> None:
    table = pd.DataFrame({"note": ["a", "b"], district: ["1", "2"], name: ["x", "y"]})
    assert shown_labels(table) == (name, [district, "note"])


def test_numbers_empty_columns_and_those_of_one_text_are_not_shown() -> None:
    table = labels(
        population=["310", "290"], empty=["", ""], country=["Mali", "Mali"], team=["A", "B"],
        rate=[0.5, None],
    )  # fmt: skip
    assert shown_labels(table) == (None, ["team"])
    assert shown_labels(pd.DataFrame(index=["V0"])) == (None, [])


def test_at_most_three_are_shown_beside_the_name() -> None:
    table = pd.DataFrame({f"text{row}": ["a", "b"] for row in range(5)} | {"region": ["1", "2"]})
    assert shown_labels(table) == (None, ["region", "text0", "text1"])
