"""Live view of many nodes: streams of samples, verdicts over windows of them, screens and documents."""
