"""The order of kernel releases: which of two is newer."""

import re

_PART = re.compile(r"[0-9]+|[a-z]+|~", re.I)
_END = (1, 0, "")


def release_key(release: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key by which newer kernel releases come later.

    Numbers compare as numbers (``6.1.0-9`` before ``6.1.0-42``) and are newer than words, as in RPM's order
    (``5.14.0-427.el9`` before ``5.14.0-427.13.1.el9``); ``~`` and ``rc`` come before everything, the end included.
    """
    parts = []
    for part in _PART.findall(release):
        if part[0].isdigit():
            # Nine digits are more than any release has; a longer run of them is rubbish and need not be exact.
            parts.append((3, int(part[:9]), ""))
        elif part in {"~", "rc"}:
            parts.append((0, 0, ""))
        else:
            parts.append((2, 0, part))
    return (*parts, _END)
