"""The two columns of a survey's positions: degrees, or kilometres or metres of a map projection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # settings are read without torch, for the command's help
    from botorch.models.transforms.input import InputTransform
    from torch import Tensor

    from bo_stream.mapping.kernel import Units

PositionUnits = Literal["degrees", "km", "m"]

POSITION_UNITS: tuple[PositionUnits, ...] = ("degrees", "km", "m")

_OF_MAPPING: dict[PositionUnits, Units] = {"degrees": "degrees", "km": "kilometres", "m": "metres"}
_KILOMETRES: dict[PositionUnits, float] = {"km": 1.0, "m": 1e-3}
_DIGITS: dict[PositionUnits, int] = {"degrees": 5, "km": 3, "m": 0}
_EXAMPLES: dict[PositionUnits, str] = {
    "degrees": "decimal degrees, such as -4.7264",
    "km": "kilometres of a map projection, such as 412.35",
    "m": "metres of a map projection, such as 412350",
}


@dataclass(frozen=True)
class Coordinates:
    """Units and names of positions.

    Attributes:
        units: ``degrees``: longitude and latitude; ``km`` or ``m``: east and north on a map
            projection, such as UTM.
    """

    units: PositionUnits = "degrees"

    @property
    def are_degrees(self) -> bool:
        """Whether they are longitude and latitude."""
        return self.units == "degrees"

    @property
    def names(self) -> tuple[str, str]:
        """Names of the two columns in all tables that a survey writes."""
        return ("longitude", "latitude") if self.are_degrees else ("east", "north")

    @property
    def mapping_units(self) -> Units:
        """The units as ``bo_stream.mapping`` names them."""
        return _OF_MAPPING[self.units]

    @property
    def cell(self) -> str:
        """Number that a cell of a position is expected to be, for messages."""
        return _EXAMPLES[self.units]

    @property
    def near(self) -> float:
        """Some five kilometres, in these units."""
        return 0.05 if self.are_degrees else 5.0 / _KILOMETRES[self.units]

    def plane(self, sites: Tensor) -> InputTransform:
        """Make the transform of positions to kilometres about the middle of the sites.

        Args:
            sites: ``n x d``, positions first.

        Raises:
            InputDataError: They are not in these units, or reach farther than 5,000 km from their
                middle.
        """
        from bo_stream.mapping import kilometres

        return kilometres(sites, units=self.mapping_units)

    def in_space(self, X: Tensor) -> Tensor:
        """Map positions, ``n x d``, to points whose distances are kilometres, ``n x 3`` or 2."""
        from bo_stream.mapping.kernel import places

        return places(X, (0, 1), self.mapping_units)

    def text(self, value: float) -> str:
        """Write a number of a position to about a metre."""
        return f"{value:.{_DIGITS[self.units]}f}"

    def label(self, value: float, column: int) -> str:
        """Write a round number of a position at the edge of a map, as in ``35° E``.

        Args:
            value: Of the position.
            column: 0: longitude or east; 1: latitude or north.
        """
        if not self.are_degrees:
            return f"{value * _KILOMETRES[self.units]:g} km"
        turned = (value + 180.0) % 360.0 - 180.0
        letters = ("EW", "NS")[column]
        letter = "" if turned == 0.0 else f" {letters[0] if turned > 0.0 else letters[1]}"
        return f"{abs(round(turned, 6)):g}°{letter}"


DEGREES = Coordinates()
