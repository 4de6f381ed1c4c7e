"""Print what apt would do on this node if some files of /etc/apt were different, as JSON. Changes nothing on the node.

Runs as ``python3 -c`` with the standard library alone. Standard input is the question::

    {"files": {path below /etc/apt/sources.list.d or preferences.d: content, empty for a file that is not to be},
     "versions": [names], "transaction": [arguments of apt-get install]}

The answer has, for ``versions``, ``versions`` (lines of apt-cache madison) and ``headers`` (names of header packages),
for ``transaction``, ``install`` ([{name, version, source}]) and ``remove`` ([names]). Where apt refuses or its lists
cannot be fetched it is ``{"error": one line}``.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

APT = Path("/etc/apt")
UPDATE_LIMIT_S = 180
ANSWER_LIMIT_S = 60
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)

# Everything that apt writes goes to the private folder; hooks of the node's own configuration must not run for it.
# Only what is asked here is fetched: no translations, sources, contents.
CONFIGURATION = """
#clear APT::Update;
#clear Acquire::IndexTargets;
Acquire::IndexTargets::deb::Packages {{
  MetaKey "$(COMPONENT)/binary-$(ARCHITECTURE)/Packages";
  flatMetaKey "Packages";
  ShortDescription "Packages";
  Description "$(RELEASE)/$(COMPONENT) $(ARCHITECTURE) Packages";
  flatDescription "$(RELEASE) Packages";
  Optional "no";
}};
Acquire::http::Timeout "20";
Acquire::https::Timeout "20";
Dir::State::lists "{folder}/lists/";
Dir::Cache "{folder}/cache/";
Dir::Log "{folder}/log/";
Dir::Etc::sourceparts "{folder}/sources.list.d/";
Dir::Etc::preferencesparts "{folder}/preferences.d/";
"""


class AptError(Exception):
    """apt did not do what it was asked for; the text says why."""


def output_of(argv, limit_s=ANSWER_LIMIT_S):
    """Standard output of a command; its process group is killed where it does not end in time or we are told to go."""
    environment = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    child = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    try:
        output, errors = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise AptError(f"{argv[0]} did not end within {limit_s} s") from None
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
    if child.returncode != 0:
        said = (errors or output).decode("utf-8", "replace").split("\n")
        named = [line for line in said if line.startswith("E: ")] or [line for line in said if line.strip()]
        raise AptError("; ".join(named[:3]) or f"{argv[0]} ended with {child.returncode}")
    return output.decode("utf-8", "replace")


def lay_over(folder, files):
    """Fill the private folder: links to the node's own files, and ``files`` in place of those of the same path."""
    for name in ("sources.list.d", "preferences.d"):
        (folder / name).mkdir()
        for path in sorted((APT / name).glob("*")):
            if str(path) not in files:
                (folder / name / path.name).symlink_to(path)
    for path, content in files.items():
        if content:
            (folder / Path(path).relative_to(APT)).write_text(content, encoding="utf-8")
    for name in ("lists/partial", "cache/archives/partial", "log"):
        (folder / name).mkdir(parents=True)
    (folder / "apt.conf").write_text(CONFIGURATION.format(folder=folder), encoding="utf-8")


def transaction(apt_get, apt_cache, arguments):
    """What ``apt-get install`` would install and remove; ``source`` is what a package is built from."""
    options = ["--no-install-recommends", "--allow-downgrades", "--allow-change-held-packages"]
    said = output_of([*apt_get, "--simulate", "--assume-yes", *options, "install", *arguments])
    versions = dict(re.findall(r"(?m)^Inst (\S+) (?:\[\S+\] )?\((\S+) ", said))
    built_from = {}
    if versions:
        shown = output_of([*apt_cache, "show", *(f"{name}={version}" for name, version in versions.items())])
        for stanza in shown.split("\n\n"):
            fields = dict(re.findall(r"(?m)^(Package|Source): (\S+)", stanza))
            if "Package" in fields:
                built_from[fields["Package"]] = fields.get("Source", fields["Package"])
    return {
        "install": [
            {"name": name, "version": version, "source": built_from.get(name.partition(":")[0], name)}
            for name, version in sorted(versions.items())
        ],
        "remove": sorted(re.findall(r"(?m)^(?:Remv|Purg) (\S+)", said)),
    }


def answer(question):
    """The answer to one question, from lists that are fetched for it and thrown away."""
    with tempfile.TemporaryDirectory(prefix="gpunode-apt-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # apt fetches as a user of its own
        lay_over(folder, question["files"])
        apt_get, apt_cache = ([tool, "-c", f"{name}/apt.conf"] for tool in ("apt-get", "apt-cache"))
        output_of([*apt_get, "--error-on=any", "update"], UPDATE_LIMIT_S)
        said = {}
        if "versions" in question:
            said["versions"] = output_of([*apt_cache, "madison", *question["versions"]]).splitlines()
            said["headers"] = output_of([*apt_cache, "pkgnames", "linux-headers-"]).split()
        if "transaction" in question:
            said.update(transaction(apt_get, apt_cache, question["transaction"]))
        return said


def leave(number, _frame):
    """Go in an orderly way, once: what is under way is killed and the private folder removed."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


def main():
    """Print one JSON document."""
    for number in SIGNALS:
        signal.signal(number, leave)
    try:
        said = answer(json.load(sys.stdin))
    except (AptError, OSError) as error:
        said = {"error": " ".join(str(error).split())}
    json.dump(said, sys.stdout)


if __name__ == "__main__":
    main()
