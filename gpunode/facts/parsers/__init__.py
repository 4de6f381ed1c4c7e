"""One parser per tool output: ``MODULE.parse(text) -> dict``.

They are pure and raise nothing but ``gpunode.facts.errors.ParseError``.
"""
