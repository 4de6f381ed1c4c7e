"""The report: results of nodes in one document, as JSON and as text."""
