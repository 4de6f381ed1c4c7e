"""Small tar archives built in memory, for copying files into an image or into a node before it starts."""

import io
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """A file, or a folder where ``text`` is None; ``path`` has no leading slash."""

    path: str
    text: str | None
    mode: int
    uid: int = 0
    gid: int = 0


def tar_of(entries: Iterable[Entry]) -> bytes:
    """Return the entries as an uncompressed tar archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for entry in entries:
            info = tarfile.TarInfo(entry.path)
            info.mode, info.uid, info.gid = entry.mode, entry.uid, entry.gid
            if entry.text is None:
                info.type = tarfile.DIRTYPE
                archive.addfile(info)
                continue
            data = entry.text.encode()
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()
