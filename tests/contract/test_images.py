"""The validator image is pinned to one stack of the catalog. It is not built here: its words are held, not its work."""

import re
from pathlib import Path

import pytest

from gpunode.catalog import load

FOLDER = Path(__file__).parents[2] / "images" / "validator"
TEXT = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
KINDS = ("devel", "runtime")
ARGUMENTS = dict(re.findall(r'^ARG (\w+)="?([^"\n]+)"?$', TEXT, re.MULTILINE))


def test_its_cuda_is_a_toolkit_of_the_catalog() -> None:
    assert ARGUMENTS["CUDA_VERSION"] in load().toolkits


def test_its_pytorch_has_a_build_of_that_cuda() -> None:
    series = ".".join(ARGUMENTS["CUDA_VERSION"].split(".")[:2])
    row = load().frameworks[f"pytorch-{'.'.join(ARGUMENTS['TORCH_VERSION'].split('.')[:2])}"]
    assert series in row.builds
    assert ARGUMENTS["TORCH_INDEX"] == f"cu{series.replace('.', '')}"


def test_its_tools_are_compiled_for_what_that_cuda_knows() -> None:
    catalog = load()
    least = catalog.cuda_majors[ARGUMENTS["CUDA_VERSION"].split(".")[0]].min_compute_capability
    known = {
        str(capability).replace(".", "")
        for architecture in catalog.architectures.values()
        for capability in architecture.compute_capabilities
    }
    chosen = ARGUMENTS["CAPABILITIES"].split()
    assert set(chosen) <= known
    assert min(map(int, chosen)) == int(str(least).replace(".", ""))
    assert chosen == sorted(chosen, key=int)


@pytest.mark.parametrize("tool", ["NCCL_TESTS", "NVBANDWIDTH"])
def test_a_tool_has_its_tag_and_the_commit_that_is_compared(tool: str) -> None:
    assert re.fullmatch(r"v\d+(\.\d+)+", ARGUMENTS[f"{tool}_TAG"])
    assert re.fullmatch(r"[0-9a-f]{7,40}", ARGUMENTS[f"{tool}_COMMIT"])
    assert f'"${tool}_TAG" "${tool}_COMMIT"' in TEXT


def test_what_pip_installs_as_root_has_hashes() -> None:
    """Every file of the project that pip reads, and every place that starts pip."""
    root = FOLDER.parents[1]
    of_scripts = [root / "scripts" / name for name in ("uv.txt", "docs.txt")]
    locks = [FOLDER / "requirements.txt", *of_scripts, root / "requirements.lock"]
    for lock in (*locks, *sorted(root.glob("roles/gpu_tools/files/*.txt"))):
        pins = re.split(r"\n(?=[a-z])", re.sub(r"^\s*#.*\n", "", lock.read_text(encoding="utf-8"), flags=re.MULTILINE))
        assert [
            pin for pin in pins if not re.match(r"[\w.\[\]-]+==\S+ .*?--hash=sha256:[0-9a-f]{64}", pin, re.DOTALL)
        ] == []
    assert f"torch=={ARGUMENTS['TORCH_VERSION']} " in locks[0].read_text(encoding="utf-8")
    series = re.search(r"^cuda-toolkit==(\d+)\.(\d+)\.", locks[0].read_text(encoding="utf-8"), re.MULTILINE)
    assert series is not None
    assert ARGUMENTS["TORCH_INDEX"] == f"cu{series[1]}{series[2]}"
    starts = [TEXT, *((root / name).read_text(encoding="utf-8") for name in ("Makefile", "scripts/bootstrap"))]
    assert '"install", "--quiet", "--require-hashes"' in (root / "scripts/docs_site.py").read_text(encoding="utf-8")
    for line in "\n".join(starts).splitlines():
        if re.search(r"pip install (?!.*--no-deps)", line):
            assert "--require-hashes" in line, line


def test_nothing_is_taken_at_its_latest() -> None:
    assert ":latest" not in TEXT
    for line in TEXT.splitlines():
        if line.startswith("FROM "):
            assert re.match(
                r"FROM nvcr\.io/nvidia/cuda:\$\{CUDA_VERSION\}-(devel|runtime)-ubuntu\$\{UBUNTU_VERSION\}", line
            )


def test_every_argument_is_explained_and_the_image_is_said_to_be_unbuilt() -> None:
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert "never built" in readme
    assert [name for name in ARGUMENTS if f"`{name}`" not in readme] == []
