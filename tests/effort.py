"""How much the tests on generated and damaged input try: a sample of it, or with GPUNODE_TEST_ALL=1 everything."""

import os

EVERYTHING = os.environ.get("GPUNODE_TEST_ALL") == "1"


def effort(sample: int, everything: int) -> int:
    """Return how many examples a test tries in this run."""
    return everything if EVERYTHING else sample
