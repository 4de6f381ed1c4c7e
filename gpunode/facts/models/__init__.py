"""Models of the facts, by topic; ``gpunode.facts.node`` exports all of them together with NodeFacts."""
