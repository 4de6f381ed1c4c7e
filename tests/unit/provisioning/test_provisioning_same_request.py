"""``gpunode plan -i`` and ``gpunode provision`` read the variables of an inventory as one request."""

from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from driver_samples import BUNDLE, DAY, facts_of
from effort import effort

from gpunode.catalog import load
from gpunode.errors import UsageError
from gpunode.facts import NodeFacts
from gpunode.provisioning.node_stack import REQUESTED, requested_by, resolved, with_request
from gpunode.stack import Request, plan
from gpunode.stack.picture import host_of

TODAY = date.fromisoformat(DAY)
A100 = {"slot": "0000:01:00.0", "vendor_id": "10de", "device_id": "20b5", "class_id": "030200", "driver": None}
VALUES: dict[str, tuple[Any, ...]] = {
    "nvidia_driver_source": (None, "auto", "debian", "nvidia"),
    "nvidia_driver_version": (None, "keep", "535", "580", "580-latest", "lts", "535.261.03"),
    "nvidia_driver_flavour": (None, "auto", "open", "proprietary"),
    "cuda_version": (None, "", "12.2", "13.0", 12.9),
    "cuda_toolkit": (None, [], ["12.9"], [11.8, "12.9"], "none"),
}
EVERY = [dict(zip(VALUES, values, strict=True)) for values in product(*VALUES.values())]


@pytest.fixture(scope="module", params=["with Debian's driver", "without a driver"])
def facts(request: pytest.FixtureRequest) -> dict[str, Any]:
    document: dict[str, Any] = {**facts_of(BUNDLE), "pci": [{**A100, "subsystem_id": "10de:1533"}]}
    if request.param == "without a driver":
        packages = [row for row in document["packages"] if "nvidia" not in row["source"]]
        document |= {"packages": packages, "loaded_driver": None, "module_files": []}
    return document


def test_a_plan_and_a_run_of_the_roles_give_one_answer(facts: dict[str, Any]) -> None:
    node = NodeFacts.model_validate(facts)
    picture, decided = host_of("n1", node, load()), 0
    for requested in EVERY[:: effort(59, 5)]:
        variables = {name: value for name, value in requested.items() if value is not None}
        try:
            roles = resolved(node, requested_by(variables), None, TODAY).group
        except UsageError:
            with pytest.raises(UsageError):
                plan([with_request(picture, variables, Request())], Request(), load(), TODAY)
            continue
        (planned,) = plan([with_request(picture, variables, Request())], Request(), load(), TODAY).groups
        assert (planned.stack, planned.conflict) == (roles.stack, roles.conflict), variables
        decided += planned.stack is not None
    assert decided > 5


def test_every_variable_is_one_of_a_role() -> None:
    defaults = "".join(
        (Path(__file__).parents[3] / f"roles/{role}/defaults/main.yml").read_text(encoding="utf-8")
        for role in ("nvidia_driver", "cuda")
    )
    assert set(REQUESTED.values()) == set(VALUES)
    assert all(f"\n{name}:" in defaults for name in REQUESTED.values())


def test_an_option_is_before_a_variable_and_a_template_needs_one(facts: dict[str, Any]) -> None:
    host = host_of("n1", NodeFacts.model_validate(facts), load())
    variables = {"nvidia_driver_source": "{{ where }}", "cuda_version": "12.2"}
    unread = with_request(host, variables, Request())
    assert unread.picture is None
    assert "nvidia_driver_source is a template" in str(unread.reason)
    option = with_request(host, variables, Request(source="nvidia", past_eol="refuse")).request
    assert option is not None
    assert (option.source, option.cuda, option.past_eol) == ("nvidia", "12.2", "refuse")
