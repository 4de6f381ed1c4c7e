"""Expected performance of a machine: physical limits, pass marks with their origin, and the assessment of a figure. The
package has no side effects."""

from gpunode.expectations.assess import Assessment, Figure, Mark, MarkRules, assess, marks_of
from gpunode.expectations.limits import (
    METRICS,
    UNITS,
    Metric,
    PhysicalLimit,
    Shape,
    Where,
    is_metric,
    limit_of,
    of_platform,
    unit_of,
)

__all__ = [
    "METRICS",
    "UNITS",
    "Assessment",
    "Figure",
    "Mark",
    "MarkRules",
    "Metric",
    "PhysicalLimit",
    "Shape",
    "Where",
    "assess",
    "is_metric",
    "limit_of",
    "marks_of",
    "of_platform",
    "unit_of",
]
