"""Columns of a survey's tables by their usual names."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from bo_stream.errors import UsageError

_NUMBER_OF = (
    "n|no|nb|nbr|nr|nro|num|number|nombre|numero|qtd|quantidade|cantidad|total|tot|sum|count|"
    "effectif"
)
_WHO = (
    "people|persons?|individuals?|children|subjects?|participants?|patients?|pupils|students|"
    "population|pop|slides?|personnes|individus|sujets|enfants|eleves|lames|personas|individuos|"
    "sujetos|ninos|ninas|pacientes|participantes|alumnos|escolares|laminas|pessoas|criancas|alunos"
)
_BY = "test|malaria|pf|pv|rdt|tdr|pcr|mic|micro|microscopy|slide|smear"
_EXAMINED = (
    "examined|tested|screened|sampled|examinees?|examine[es]?s?|testees?|testes|depiste?e?s|"
    "prelevee?s|examinad[oa]s?|testad[oa]s?|analisad[oa]s?|analizad[oa]s?|evaluad[oa]s?|"
    "muestread[oa]s?|rastread[oa]s?|tamizad[oa]s?"
)
_POSITIVE = (
    "positives?|pos|cases|infected|infectee?s?|infestee?s?|cas|malades|positifs?|caspositifs|"
    "positiv[oa]s?|infectad[oa]s?|infetad[oa]s?|casos|casospositivos|enfermos"
)
_COUNTED = rf"(?:(?:{_NUMBER_OF})(?:of|de|total|totalde)?)"
_SUFFIX = "(?:n|no|total|number)?"


@dataclass(frozen=True)
class _Role:
    """A meaning that a column can have.

    Attributes:
        name: Name that a column with this meaning should have; it goes before the others.
        meaning: What its cells are, for messages.
        others: Further usual names, without blanks, signs and accents.
        option: Option of the command that says which column it is, if there is one.
        later: Names that are taken where there is none of the others.
        pattern: Expression of further names.
    """

    name: str
    meaning: str
    others: tuple[str, ...]
    option: str = ""
    later: tuple[str, ...] = ()
    pattern: str = "(?!)"


_PLACES = (
    "site", "village", "cluster", "grappe", "conglomerado", "localite", "localidad", "localidade",
    "aldea", "aldeia", "pueblo", "povoado", "community", "communaute", "comunidad", "comunidade",
    "school", "ecole", "escuela", "escola",
)  # fmt: skip
_PLACE = "|".join(_PLACES)

_ROLES = {
    role.name: role
    for role in (
        _Role(
            "id",
            "ids",
            ("ea", "uid"),
            "--id",
            _PLACES,
            rf"(?:no|num|numero|n)?(?:id|code|cod|codigo|identifie?r|identifiant|identificador)"
            rf"(?:du|de|da|do|dela|del|des)?(?:{_PLACE})?|(?:{_PLACE})(?:id|no|num|number|code|codigo)"
            rf"|(?:no|num|numero)(?:du|de|da|do|dela|del)?(?:{_PLACE})",
        ),
        _Role(
            "longitude",
            "longitudes",
            (
                "lon", "long", "lng", "x", "gpslongitude", "gpslon", "gpslong", "gpslng", "londd",
                "longdd", "xcoord", "coordx", "decimallongitude", "longitud", "longnum",
            ),
            "--x",
        ),
        _Role(
            "latitude",
            "latitudes",
            (
                "lat", "y", "gpslatitude", "gpslat", "latdd", "ycoord", "coordy",
                "decimallatitude", "latitud", "latnum",
            ),
            "--x",
        ),
        _Role(
            "east",
            "eastings",
            (
                "easting", "eastings", "x", "xcoord", "coordx", "utme", "utmx", "utmeast",
                "utmeasting", "xutm", "eastm", "eastingm", "xm", "eastkm", "xkm",
            ),
            "--x",
        ),
        _Role(
            "north",
            "northings",
            (
                "northing", "northings", "y", "ycoord", "coordy", "utmn", "utmy", "utmnorth",
                "utmnorthing", "yutm", "northm", "northingm", "ym", "northkm", "ykm",
            ),
            "--x",
        ),
        _Role(
            "examined",
            "people examined",
            (
                "n", "ex", "denominator", "denominateur", "denominador", "samplesize",
                "tailleechantillon", "tamanomuestra", "tamanhoamostra",
            ),
            "--examined",
            (),
            rf"{_COUNTED}?(?:{_WHO})?(?:{_BY})?(?:{_EXAMINED}){_SUFFIX}"
            rf"|{_COUNTED}(?:{_WHO})?(?:exam|test|examen|teste)s?",
        ),
        _Role(
            "positive",
            "people who tested positive",
            ("pf", "numerator", "numerateur", "numerador"),
            "--positive",
            (),
            rf"{_COUNTED}?(?:{_WHO})?(?:{_BY})?(?:{_POSITIVE})(?:{_BY})?{_SUFFIX}"
            rf"|{_COUNTED}(?:{_WHO})?(?:inf|infect|case)",
        ),
        _Role(
            "date",
            "dates of results",
            (
                "surveydate", "dateofsurvey", "datesurvey", "datesurveyed", "visitdate",
                "dateofvisit", "datevisit", "examdate", "examinationdate", "dateexamined",
                "dateofexamination", "dateenquete", "datedenquete", "datevisite", "datainquerito",
                "datadoinquerito", "fecha", "fechaencuesta",
            ),
        ),
    )
}  # fmt: skip
"""Meanings by name."""

_COUNT_LIKE = re.compile(
    r"(exam|test|screen|depist|posit|infec|infest|malad|negat|analis|analiz|tamiz|muestr|sampl)"
    r"|(^|_)(n|no|nb|num)?_?(pos|inf|neg|cas|caso|case)s?(_|$)"
)

_RATE = re.compile(r"(pf_?)?(pr|rate|percent|per_cent|positivity)([\d_].*)?|.*prevalence.*")


def normalised(name: str) -> str:
    """Reduce a column's name to small letters, digits and single underscores, without its unit.

    As in ``Longitude (deg)``, which becomes ``longitude``. Letters lose their accents, and ``N°``
    and ``#`` become ``no``.
    """
    plain = unaccented(name.replace("°", "o ").replace("#", "no "))
    bare = re.sub(r"[(\[].*?[)\]]", " ", plain)
    return re.sub(r"[^a-z0-9]+", "_", bare).strip("_")


def unaccented(text: str) -> str:
    """Return a text in lower case and without accents."""
    plain = unicodedata.normalize("NFKD", text.casefold())
    return "".join(c for c in plain if not unicodedata.combining(c))


def squeezed(name: str) -> str:
    """Reduce a column's name further, by the underscores, as in ``noexam``."""
    return normalised(name).replace("_", "")


def look_like_counts(names: Sequence[str]) -> list[str]:
    """Return the columns whose names may mean numbers of people examined or positive."""
    return [name for name in names if _COUNT_LIKE.search(normalised(name))]


def find_column(names: Sequence[str], role: str, given: str | None, source: str) -> str | None:
    """Find the column with a meaning, None if there is none.

    Args:
        names: Of the columns.
        role: The meaning: id, longitude, latitude, east, north, examined, positive or date.
        given: Name that the user gave; None: by the usual names.
        source: Name of the table, for messages.

    Raises:
        UsageError: The given column is not there, or two could be meant.
    """
    known = _ROLES[role]
    if given is not None:
        return given_column(names, given, source, known.option)
    keys, usual = {name: squeezed(name) for name in names}, re.compile(known.pattern)
    likely = (
        [name for name in names if normalised(name) == role]
        or [n for n, key in keys.items() if key in known.others or usual.fullmatch(key)]
        or [name for name, key in keys.items() if key in known.later]
    )
    if len(likely) > 1:
        advice = f"Say which by {known.option}, or rename" if known.option else "Rename"
        raise UsageError(
            f"{source}: columns {', '.join(map(repr, likely))} could each be that of "
            f"{known.meaning}. {advice} one {role!r}."
        )
    return likely[0] if likely else None


def required_column(names: Sequence[str], role: str, given: str | None, source: str) -> str:
    """Find the column with a meaning; arguments as :func:`find_column`.

    Raises:
        UsageError: There is none, or two could be meant.
    """
    found = find_column(names, role, given, source)
    if found is not None:
        return found
    advice = f"Name it {role!r}, or say which it is by {_ROLES[role].option}."
    rate = rate_column(names)
    if role == "positive" and rate is not None:
        advice = (
            f"Column {rate!r} looks like a prevalence: the number of people who tested "
            "positive is needed instead, in a column 'positive'."
        )
    east = None if role != "longitude" else find_column(names, "east", None, source)
    if east is not None:
        advice = f"Column {east!r} looks like that of a map projection: say --units m, or km."
    raise UsageError(
        f"{source} has no column of {_ROLES[role].meaning}. Its columns: {', '.join(names)}. "
        f"{advice}"
    )


def rate_column(names: Sequence[str]) -> str | None:
    """Find the first column whose name is a usual one of prevalences, None if there is none."""
    return next((name for name in names if _RATE.fullmatch(normalised(name))), None)


def given_column(names: Sequence[str], given: str, source: str, option: str) -> str:
    """Return the name of a column that the user gave.

    Raises:
        UsageError: There is no such column.
    """
    if given not in names:
        like = [name for name in names if squeezed(name) == squeezed(given)]
        hint = f" Is it {like[0]!r}?" if like else ""
        raise UsageError(
            f"{source} has no column {given!r}, which {option} names.{hint} Its columns: "
            f"{', '.join(names)}."
        )
    return given


def listed_as(names: Iterable[Hashable], taken: Iterable[Hashable]) -> dict[Hashable, str]:
    """Name the columns of the list in a table that has columns of its own.

    Args:
        names: Of the columns of the list.
        taken: Names of the table's own columns.

    Returns:
        New names by names, all different: ``listed_`` goes before one that is taken, as often as it
        takes to be free.
    """
    renamed: dict[Hashable, str] = {}
    own, names = set(taken), list(names)
    used = own.union(names)
    for name in names:
        new = str(name)
        while new in used and name in own:
            new = f"listed_{new}"
        used.add(new)
        renamed[name] = new
    return renamed
