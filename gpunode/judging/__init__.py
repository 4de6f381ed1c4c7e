"""The room that judges: answers of nodes and a request in, reports on nodes out.

``Evaluator(request).judge_fleet(answers)`` yields one result for each node, evaluated in a child process with limits.
Readers of what a request contains are modules of their own: ``policy``, ``expectation``, ``baseline``,
``measured_logs``; ``saved`` reads bundles from files.
"""

from gpunode.judging.evaluator import Evaluator, JudgedNode, NodeAnswer, findings_of
from gpunode.judging.report import NodeReport, Report
from gpunode.judging.request import EvaluatedNode, JudgingRequest, selected_checks

__all__ = [
    "EvaluatedNode",
    "Evaluator",
    "JudgedNode",
    "JudgingRequest",
    "NodeAnswer",
    "NodeReport",
    "Report",
    "findings_of",
    "selected_checks",
]
