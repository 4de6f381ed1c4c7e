"""Time limits as options."""

import math
from typing import Any

import click

LONGEST_S = 7 * 24 * 3600
"""Far beyond any node's work, and within what clocks can wait for."""


class Seconds(click.FloatRange):
    """A time limit of at least ``least_s``; ``nan``, which is within every range, is none."""

    def __init__(self, least_s: float) -> None:
        super().__init__(min=least_s, max=LONGEST_S)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is no time.", param, ctx)
        return number
