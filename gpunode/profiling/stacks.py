"""Stacks that py-spy recorded (``--format raw``: frames joined by ``;``, then the number of samples), as a table."""

import re
from collections import Counter

from gpunode.profiling.errors import ProfileError
from gpunode.profiling.patterns import LOADING_SHARE, ProfilePattern, percent

LINE = re.compile(r"(.+) (\d+)$")
LOADER = re.compile(r"torch/utils/data/|tensorflow/python/data/")
MOST_SHOWN = 3


def patterns(text: str) -> list[ProfilePattern]:
    """Return the table of py-spy's samples. Raises ProfileError for another format."""
    loading = total = 0
    last: Counter[str] = Counter()
    for line in text.splitlines():
        if not line.strip():
            continue
        match = LINE.match(line)
        if match is None:
            raise ProfileError(f"py-spy's output has a line that is not a stack: {line[:80]!r}")
        frames, number = match[1].split(";"), int(match[2])
        total += number
        loading += number if any(LOADER.search(frame) for frame in frames) else 0
        last[frames[-1]] += number
    if not total:
        raise ProfileError("py-spy recorded no sample: the command ended at once, or started no Python")
    share = loading / total
    hottest = ", ".join(f"{name} {percent(number / total)}" for name, number in last.most_common(MOST_SHOWN))
    bad = share > LOADING_SHARE
    return [
        ProfilePattern(
            pattern="data loading",
            value=round(share, 4),
            measured=f"{percent(share)} of {total} samples of all threads and processes",
            status="look" if bad else "ok",
            cause="samples are prepared in these processes" if bad else "",
            change="num_workers; gpunode validate --level deep --data DIR names the limit of the files" if bad else "",
        ),
        ProfilePattern(pattern="functions", value=None, measured=hottest, status="ok"),
    ]
