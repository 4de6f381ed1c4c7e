"""The facts' models, by theme; ``gpunode.facts.node`` has all of them together with NodeFacts."""
