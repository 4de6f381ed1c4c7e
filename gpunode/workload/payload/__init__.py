"""The program that runs inside the container, and that program as one file for the sending side.

It needs Python 3.8 or later, the standard library and the image's modules; this module stays behind.
"""

import base64
import io
import zipfile
from importlib.resources import files

PACKAGE = "gpunode.workload.payload"
MAIN = f"import sys\n\nfrom {PACKAGE}.main import run\n\nsys.exit(run(sys.argv[1:]))\n"
# The archive is written to a folder of its own and is removed when the run is over.
SCRIPT = """\
import base64, os, runpy, shutil, sys, tempfile
folder = tempfile.mkdtemp(prefix="gpunode-")
try:
    path = os.path.join(folder, "payload.pyz")
    with open(path, "wb") as file:
        file.write(base64.b64decode("{archive}"))
    sys.argv[0] = path
    runpy.run_path(path, run_name="__main__")
finally:
    shutil.rmtree(folder, ignore_errors=True)
"""


LIMITS = f"""\
import json

from {PACKAGE}.image import limits

print(json.dumps({{"record": "versions.limits", "values": limits()}}))
print(json.dumps({{"record": "end", "records": 1}}))
"""
"""Program that reads the engine's default limits in a container."""


def payload_zip(program: str = MAIN) -> bytes:
    """Return the payload as an archive that ``python3 -I payload.pyz --tests versions,gpus,frameworks`` runs.

    The same sources result in the same bytes. ``program``: the module that is run.
    """
    folder = PACKAGE.replace(".", "/")
    parents = [folder.rsplit("/", depth)[0] for depth in (2, 1, 0)]
    sources = {"__main__.py": program, **{f"{parent}/__init__.py": "" for parent in parents}}
    for source in files(PACKAGE).iterdir():
        if source.name.endswith(".py") and source.name != "__init__.py":
            sources[f"{folder}/{source.name}"] = source.read_text(encoding="utf-8")
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as pack:
        for name, text in sorted(sources.items()):
            pack.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), text, zipfile.ZIP_DEFLATED)
    return archive.getvalue()


def payload_script() -> str:
    """Return the payload as a program for ``python3 -I - --tests versions``, which needs no file on the node."""
    return SCRIPT.format(archive=base64.b64encode(payload_zip()).decode("ascii"))
