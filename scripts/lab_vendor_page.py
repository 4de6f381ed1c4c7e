"""Write the assumptions of the lab's vendor repository, from its data, into docs/lab-vendor.md.

    .venv/bin/python scripts/lab_vendor_page.py [--check]

The list stands between two comments of the page. ``--check`` writes nothing and exits 1 if the page differs.
"""

import sys
from collections import defaultdict
from pathlib import Path

from gpunode.lab.packages.plan import contents, recorded_in
from gpunode.lab.packages.recorded import assumptions, recorded
from gpunode.lab.packages.rows import packages, repositories

PAGE = Path(__file__).resolve().parent.parent / "docs/lab-vendor.md"
BEGIN, END = "<!-- generated: scripts/lab_vendor_page.py -->", "<!-- end of what is generated -->"


def listed() -> str:
    """Return the list as Markdown."""
    texts = assumptions()["assumptions"]
    used: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name, repository in repositories().items():
        for offer in recorded_in(repository):
            for key in offer.assumed:
                used[key][name].add(offer.name)
    lines = ["| assumption | content | packages that rest on it |", "|---|---|---|"]
    for key, text in texts.items():
        says = text["assumption"] if "assumption" in text else text["note"]
        where = ", ".join(f"{name} {len(names)}" for name, names in sorted(used[key].items())) or "none by name"
        lines.append(f"| `{key}` | {says.replace('|', chr(92) + '|')} | {where} |")
    lines += ["", "Packages that no index records and the lab has, as rows of its own:", ""]
    for name, repository in repositories().items():
        known = recorded(repository.recorded)["packages"] if repository.recorded else {}
        own = sorted({built.name for built in contents(repository)} - set(known))
        if own and name != "ubuntu":
            lines.append(f"- {name}: {', '.join(f'`{each}`' for each in own)}")
    rows = sum(len(packages(each)) for each in repositories()["ubuntu"].rows)
    lines.append(f"- ubuntu: {rows} rows; recorded are dkms, libxnvctrl0, the `-server` drivers, transitional packages")
    lines += [
        "",
        "Recorded, and not in the lab: no version is recorded, or no driver's release of the lab has them:",
        "",
    ]
    for name, repository in repositories().items():
        if repository.recorded:
            held = {built.name for built in contents(repository)}
            left = sorted(set(recorded(repository.recorded)["packages"]) - held - {"cuda-keyring"})
            lines += [f"- {name}: {', '.join(f'`{each}`' for each in left)}"] if left else []
    lines += ["", "Unknown, and so neither right nor wrong here:", ""]
    lines += [f"- {row['what']} ({row['touches']})" for row in assumptions()["unknown"]]
    return "\n".join(lines)


def main() -> int:
    """Write the page, or compare it."""
    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    new = f"{head}{BEGIN}\n\n{listed()}\n\n{END}{tail}"
    if "--check" in sys.argv[1:]:
        if new != text:
            sys.stderr.write(f"{PAGE}: the list does not match the data: run this script without --check\n")
        return int(new != text)
    beside = PAGE.with_name(f".{PAGE.name}.new")
    beside.write_text(new, encoding="utf-8")
    beside.rename(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
