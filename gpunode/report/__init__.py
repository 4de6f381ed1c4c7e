"""Verdicts on nodes put together: the report, for programs and for people."""

from gpunode.report.model import NodeReport, Report, exit_code, judged, report, unchecked, unreachable

__all__ = ["NodeReport", "Report", "exit_code", "judged", "report", "unchecked", "unreachable"]
