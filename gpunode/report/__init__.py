"""The report: results of nodes in one document, as JSON and as text."""

from gpunode.judging.report import NodeReport, Report, exit_code, judged, report, unchecked, unreachable

__all__ = ["NodeReport", "Report", "exit_code", "judged", "report", "unchecked", "unreachable"]
