"""One parser per tool output: ``MODULE.parse(text) -> model``.

Parsers have no side effects and raise only ``gpunode.facts.errors.ParseError``.
"""
