"""One parser per tool output: ``MODULE.parse(text) -> dict``, pure, raising only ``gpunode.facts.errors.ParseError``."""
