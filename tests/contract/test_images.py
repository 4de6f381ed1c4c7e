"""The validator image: its locks are of versions that the catalog has, and all in it has a hash or a signature."""

import re
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from gpunode.catalog import load
from gpunode.errors import UsageError

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "images" / "validator"
sys.path.insert(0, str(ROOT / "scripts"))

import validator_image  # noqa: E402

LOCKS = {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.txt")}
TEXT = """\
workload_images:
  validator-cuda:
    image: gpunode-validator:cuda
    digest: unpublished
    cuda: 13.0
  validator-tensorflow-cuda:
    image: gpunode-validator:tensorflow-cuda
    digest: unpublished
    cuda: 12.9
"""
DIGEST = f"sha256:{'ab' * 32}"


def pins(text: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))


def test_every_build_has_its_lock_and_its_request() -> None:
    assert set(LOCKS) == set(validator_image.BUILDS)
    for build, text in LOCKS.items():
        requested = (FOLDER / f"{build}.in").read_text(encoding="utf-8").split()
        names = {re.split(r"[\[=]", requirement)[0] for requirement in requested}
        assert names <= set(pins(text))


def test_its_pytorch_has_a_build_of_its_cuda() -> None:
    row, locked = load().workload_images["validator-cuda"], pins(LOCKS["cuda"])
    release = ".".join(locked["torch"].split(".")[:2])
    assert row.cuda in load().frameworks[f"pytorch-{release}"].builds
    assert ".".join(locked["nvidia-cuda-runtime"].split(".")[:2]) == row.cuda
    wheel = load().wheels[f"cu{row.cuda.replace('.', '')}-x86_64"]
    assert Version(wheel.since) <= Version(release) <= Version(wheel.until or release)
    assert row.min_compute_capability == min(wheel.compute_capabilities, key=Version)


def test_its_tensorflow_has_its_cuda() -> None:
    row, locked = load().workload_images["validator-tensorflow-cuda"], pins(LOCKS["tensorflow-cuda"])
    assert ".".join(locked["nvidia-cuda-runtime-cu12"].split(".")[:2]) == row.cuda
    assert locked["tensorflow"] == pins(LOCKS["tensorflow-cpu"])["tensorflow-cpu"]


def test_builds_for_the_processor_have_no_cuda() -> None:
    for build in ("cpu", "tensorflow-cpu"):
        assert [name for name in pins(LOCKS[build]) if name.startswith(("nvidia-", "cuda-", "triton"))] == []


def test_what_pip_installs_as_root_has_hashes() -> None:
    """Every file of the project that pip reads, and every place that starts pip."""
    of_scripts = [ROOT / "scripts" / name for name in ("uv.txt", "docs.txt", "mutation.txt")]
    locks = [*FOLDER.glob("*.txt"), *of_scripts, ROOT / "requirements.lock"]
    assert len(locks) > 5
    for lock in (*locks, *sorted(ROOT.glob("roles/gpu_tools/files/*.txt"))):
        lines = re.sub(r"^\s*#.*\n", "", lock.read_text(encoding="utf-8"), flags=re.MULTILINE)
        wrong = [
            pin
            for pin in re.split(r"\n(?=[a-z])", lines)
            if not re.match(r"[\w.\[\]-]+==\S+ .*?--hash=sha256:[0-9a-f]{64}", pin, re.DOTALL)
        ]
        assert wrong == []
    for name in ("docs_site.py", "wheels.py"):
        starts = re.findall(r'pip"\)?, (?:"install"|verb)[^\]]*', (ROOT / "scripts" / name).read_text(encoding="utf-8"))
        assert starts
        assert all('"--require-hashes"' in start for start in starts)
    for name in ("Makefile", "scripts/bootstrap"):
        for line in (ROOT / name).read_text(encoding="utf-8").splitlines():
            if re.search(r"pip install (?!.*--no-deps)", line):
                assert "--require-hashes" in line, line


def test_a_change_of_the_lock_is_another_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = validator_image.digest_of("cpu")
    (tmp_path / "all_reduce_perf").write_text("program")
    assert validator_image.digest_of("cpu", tmp_path) != before
    (tmp_path / "cpu.txt").write_text(LOCKS["cpu"].replace("pillow==", "pillow==1"))
    monkeypatch.setattr(validator_image, "FOLDER", tmp_path)
    assert validator_image.digest_of("cpu") != before


def test_a_release_writes_name_and_digest_into_the_catalog() -> None:
    text = validator_image.record(TEXT, "cuda", "registry.example.org/validator:1", DIGEST)
    assert text == TEXT.replace(
        "gpunode-validator:cuda\n    digest: unpublished", f"registry.example.org/validator:1\n    digest: {DIGEST}"
    )
    real = validator_image.CATALOG.read_text(encoding="utf-8")
    for build in ("cuda", "tensorflow-cuda"):
        assert validator_image.record(real, build, "registry.example.org/validator:1", DIGEST) != real
    with pytest.raises(UsageError):
        validator_image.record(TEXT, "cpu", "registry.example.org/validator:1", DIGEST)


def test_every_option_is_explained() -> None:
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    options = re.findall(
        r'add_argument\(\s*"(--[a-z]+)"', (ROOT / "scripts/validator_image.py").read_text(encoding="utf-8")
    )
    assert len(options) == 5
    assert [name for name in (*options, *validator_image.BUILDS) if f"`{name}" not in readme] == []
