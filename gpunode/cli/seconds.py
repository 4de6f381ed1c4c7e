"""Time limits as options."""

import math
import re
from typing import Any

import click

LONGEST_S = 7 * 24 * 3600
"""Longer than any node's work, and within the range of clocks."""


class Seconds(click.FloatRange):
    """A time limit of at least ``least_s``; ``nan``, which is within every range, is refused."""

    def __init__(self, least_s: float) -> None:
        super().__init__(min=least_s, max=LONGEST_S)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if math.isnan(number):
            self.fail(f'"{value}" is not a number of seconds (example: 90).', param, ctx)
        return super().convert(number, param, ctx)


class Duration(Seconds):
    """A time limit that may have a unit: ``5``, ``5s``, ``2m``."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the seconds."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|)", str(value))
        if match is None:
            self.fail(f'"{value}" is not a duration (examples: 5, 5s, 2m).', param, ctx)
        return super().convert(float(match[1]) * (60 if match[2] == "m" else 1), param, ctx)
