"""Names and districts of sites: which further columns of a list of sites a reader looks for."""

from __future__ import annotations

import re

import pandas as pd

from bo_stream.loops.survey.columns import normalised

MOST = 3
"""Columns that are shown beside a name."""

_NAME = re.compile(
    r"(site_|village_|school_|cluster_|place_|locality_|community_)?name|village|locality|settlement"
    r"|community|school|localite|nom(_du|_de_la|_de)?(_village|_localite|_site)?|nome|nombre|aldeia"
    r"|comunidade|comunidad|localidad|localidade"
)
_DISTRICT = re.compile(
    r"adm(in)?_?\d(_name)?|.*(district|distrito|region|regiao|provin|county|commune|municip|ward"
    r"|departe?ment|departamento|chiefdom|parish|island|constituency|cercle|woreda|health_area).*"
    r"|zone|state|lga|ta|t_a|area|sector"
)


def shown_labels(labels: pd.DataFrame) -> tuple[str | None, list[str]]:
    """Choose the columns that say which site it is.

    Args:
        labels: Further columns of a list, such as ``Survey.labels``.

    Returns:
        The column of names, None if there is none by its usual names; and up to ``MOST`` others:
        districts and the like first, then other columns of texts that differ between sites.
    """
    columns = [str(name) for name in labels.columns]
    name = next((one for one in columns if _NAME.fullmatch(normalised(one))), None)
    others = [one for one in columns if one != name]
    districts = [one for one in others if _DISTRICT.fullmatch(normalised(one))]
    texts = [one for one in others if one not in districts and _has_texts(labels[one])]
    return name, [*districts, *texts][:MOST]


def _has_texts(column: pd.Series[str]) -> bool:
    """Return whether a column has texts with letters, and not the same in all rows."""
    texts = column.dropna().astype(str).str.strip()
    texts = texts[texts != ""]
    lettered = texts.str.contains(r"[^\W\d_]", regex=True)
    return bool(len(texts)) and bool(lettered.mean() > 0.5) and texts.nunique() > 1
