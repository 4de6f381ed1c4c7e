"""Node names in short and in full."""

import random
import time

import pytest
from effort import effort

from gpunode.errors import UsageError
from gpunode.names import expand, expand_all, fold


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("gpu1", ["gpu1"]),
        ("gpu-[01-03]", ["gpu-01", "gpu-02", "gpu-03"]),
        ("gpu[1-2,5]", ["gpu1", "gpu2", "gpu5"]),
        ("gpu[8-10]", ["gpu8", "gpu9", "gpu10"]),
        ("gpu1,login2", ["gpu1", "login2"]),
        ("gpu1,", ["gpu1"]),
        ("root@gpu-[1-2]:2222", ["root@gpu-1:2222", "root@gpu-2:2222"]),
        ("rack[1-2]-gpu[1-2]", ["rack1-gpu1", "rack1-gpu2", "rack2-gpu1", "rack2-gpu2"]),
        ("gpu[1-3]!gpu2", ["gpu1", "gpu3"]),
        ("127.0.1.[9-11]", ["127.0.1.9", "127.0.1.10", "127.0.1.11"]),
        ("gpu[1-8/4]", ["gpu1", "gpu5"]),
        ("[::1]:22", ["[::1]:22"]),
        ("user@[fe80::1%eth0]:22", ["user@[fe80::1%eth0]:22"]),
        ("ssh://root@gpu1:22", ["ssh://root@gpu1:22"]),
    ],
)
def test_a_word_stands_for_its_names(word: str, names: list[str]) -> None:
    assert expand(word) == names


@pytest.mark.parametrize(
    "word", ["gpu[3-1]", "gpu[1-", "gpu[1-2", "gpu[a-b]", "gpu[]", "gpu[1-2][", "gpu[1-],gpu2", "gpu1,gpu[2"]
)
def test_what_is_no_range_is_named(word: str) -> None:
    with pytest.raises(UsageError) as info:
        expand(word)
    assert str(info.value).startswith(f"{word}: not a valid range of node names")
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("word", ["gpu[1-999999999999]", "rack[1-200]-gpu[1-200]", "gpu[0-10000]"])
def test_too_many_are_refused_before_they_are_listed(word: str) -> None:
    with pytest.raises(UsageError, match="more than 10000 nodes"):
        expand(word)


def test_a_name_in_two_words_is_refused() -> None:
    assert expand_all(["gpu[1-2]", "gpu3"]) == ["gpu1", "gpu2", "gpu3"]
    with pytest.raises(UsageError, match=r"^gpu\[2-3\]: listed more than once$"):
        expand_all(["gpu[1-3]", "gpu[2-4]"])


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        ([], ""),
        (["gpu1"], "gpu1"),
        (["gpu-03", "gpu-01", "gpu-02", "gpu-01"], "gpu-[01-03]"),
        (["gpu1", "login"], "gpu1,login"),
        (["127.0.1.7", "127.0.1.8"], "127.0.1.[7-8]"),
        (["[::1]:22", "gpu1", "gpu2"], "gpu[1-2],[::1]:22"),
        (["@odd", "a b", "100%"], "100%,@odd,a b"),
    ],
)
def test_names_are_folded(names: list[str], folded: str) -> None:
    assert fold(names) == folded


def test_what_is_folded_comes_out_again() -> None:
    names = [f"gpu-{number:03d}" for number in (1, 2, 3, 17, 99, 100)] + ["login", "rack2-gpu7", "rack2-gpu8"]
    assert sorted(expand(fold(names))) == sorted(names)


@pytest.mark.parametrize("seed", range(effort(8, 400)))
def test_names_of_a_hostile_node_are_folded_in_time_and_stay_what_they_are(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    numbers = ("1", "07", "9" * 30, "9" * 5000, "0" * 5000 + "1", "\u0663", "\xb2", "", "10")
    parts = (*numbers, "gpu", "-", "/", "@", "*", "..", "\x00", "{", "a" * 3000)
    names = ["".join(chance.choices(parts, k=chance.randrange(6))) for _ in range(chance.choice((1, 3, 200)))]
    axes = chance.choice((3, 4, 8))
    names += ["x".join(str(chance.randrange(100)) for _ in range(axes)) for _ in range(chance.choice((0, 1000)))]
    started = time.process_time()
    folded = fold(names)
    assert time.process_time() - started < 2
    assert all(name in folded for name in names if not name.isascii())
    regular = [name for name in names if "x" in name][:50]
    assert set(expand(fold(regular))) == set(regular) or not regular
