"""All settings for one node and one workload, in the formats of the programs that read them."""

import shlex
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

from packaging.version import Version as Number

from gpunode.catalog import load
from gpunode.facts import NodeFacts
from gpunode.text import one_line
from gpunode.tuning import containers, kernel, libraries, network, slices
from gpunode.tuning.model import TRAITS, LeftAlone, NodeSlice, NodeTuning, Profile, Setting, Traits, Tuning

Workload = Literal["pytorch", "tensorflow", "nccl-tests"]
WORKLOADS: tuple[Workload, ...] = get_args(Workload)


def tune(  # noqa: PLR0913
    node: NodeFacts,
    workload: Workload,
    *,
    profile: Profile = "training",
    multi_node: bool = False,
    expandable: bool = False,
    part: NodeSlice | None = None,
) -> Tuning:
    """Return the settings for a workload on a node or a slice of it, or over several nodes including this one.

    Settings without the necessary facts are left alone, with that as the reason. ``expandable``: PyTorch's expandable
    segments.
    """
    environment = [
        *network.nccl(node, multi_node=multi_node),
        *(slices.visible(part) if part else ()),
        *_of_workload(node, workload, TRAITS[profile], part, expandable=expandable),
    ]
    docker = [
        *containers.gpus(node, part),
        *containers.limits(node, part),
        *network.devices(node, multi_node=multi_node),
    ]
    return Tuning(
        host=node.host,
        simulated=node.simulated,
        profile=profile,
        workload=workload,
        multi_node=multi_node,
        environment=_settings(environment),
        docker=_settings(docker),
        program=tuple(slices.program(node, part, workload)) if part else (),
        part=part,
        left_alone=_left(environment, docker),
        node=tune_node(node, profile),
    )


def _of_workload(
    node: NodeFacts, workload: Workload, traits: Traits, part: NodeSlice | None, *, expandable: bool
) -> Iterable[Setting | LeftAlone]:
    yield from libraries.cuda(node)
    if workload != "nccl-tests":
        yield from libraries.threads(node) if part is None else slices.threads(part, libraries.THREADS)
    if workload == "tensorflow":
        yield from libraries.tensorflow(node, traits)
    if workload == "pytorch":
        yield libraries.allocator(node, expandable=expandable)


def tune_node(node: NodeFacts, profile: Profile, *, shared: bool = False, fleet: int = 0) -> NodeTuning:
    """Return the settings of a node for all users.

    ``shared``: users who share it get a default number of threads; ``fleet``: number of nodes on one network, 0 if it
    is unknown.
    """
    traits = TRAITS[profile]
    environment = [*libraries.order(node), *libraries.tensorflow(node, traits)]
    environment += libraries.threads(node) if shared else ()
    nccl = [*network.nccl_conf(node)]
    of_kernel = [*kernel.settings(node, traits, fleet=fleet)]
    return NodeTuning(
        environment=_settings(environment),
        nccl=_settings(nccl),
        kernel=_settings(of_kernel),
        left_alone=_left(environment, nccl, of_kernel),
    )


def _settings(parts: Sequence[Setting | LeftAlone]) -> tuple[Setting, ...]:
    return tuple(part for part in parts if isinstance(part, Setting))


def _left(*lists: Sequence[Setting | LeftAlone]) -> tuple[LeftAlone, ...]:
    return tuple(part for parts in lists for part in parts if isinstance(part, LeftAlone))


def docker_args(tuning: Tuning) -> list[str]:
    """Return arguments for ``docker run``, including the environment; none of them needs quoting in a shell."""
    words = [word for setting in tuning.docker for word in (setting.name, setting.value) if word]
    for setting in tuning.environment:
        words += ["--env", f"{setting.name}={setting.value}"]
    return words


def shell(tuning: Tuning) -> str:
    """Return text for ``eval`` or a shell's file: each variable below its reason."""
    bound = (
        f"# Start the program with: taskset --cpu-list {tuning.part.cpus}\n" if tuning.part and tuning.part.cpus else ""
    )
    return (
        _head(tuning)
        + bound
        + "".join(
            f"# {setting.reason}\nexport {setting.name}={_quoted(setting.value)}\n" for setting in tuning.environment
        )
    )


def systemd(tuning: Tuning) -> str:
    """Return text for a drop-in of a service: each variable below its reason."""
    share = ""
    if tuning.part and tuning.part.cpus:
        share += f"# The processors near {tuning.part.title}\nCPUAffinity={tuning.part.cpus}\n"
    if tuning.part and tuning.part.memory_gib:
        share += f"# The share of {tuning.part.title}\nMemoryMax={tuning.part.memory_gib}G\n"
    return f"{_head(tuning)}[Service]\n{share}" + "".join(
        f"# {setting.reason}\nEnvironment={_for_systemd(f'{setting.name}={setting.value}')}\n"
        for setting in tuning.environment
    )


def _for_systemd(assignment: str) -> str:
    # systemd.exec(5): double quotes with C escapes; a percent sign begins a specifier.
    escaped = assignment.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


def nccl_conf(settings: Sequence[Setting], head: str) -> str:
    """Return the text of ``/etc/nccl.conf``: bare assignments.

    NCCL treats quotes as part of the value, and older versions every line with an equals sign as a setting, so that
    comments have none.
    """
    return f"# {head.replace('=', ' ')}\n" + "".join(f"{setting.name}={setting.value}\n" for setting in settings)


def node_shell(settings: Sequence[Setting], head: str) -> str:
    """Return the text of a file in ``/etc/profile.d``: variables that a user has set stay unchanged."""
    return f"# {head}\n" + "".join(
        f"# {setting.reason}\nexport {setting.name}=${{{setting.name}:-{shlex.quote(setting.value)}}}\n"
        for setting in settings
    )


def _quoted(value: str) -> str:
    # zsh replaces a word after = with the path of a program.
    return f"'{value}'" if value.startswith("=") and "'" not in value else shlex.quote(value)


def env_file(tuning: Tuning) -> str:
    """Return text for ``docker run --env-file``: without quotes and trailing text. Its other arguments are comments."""
    arguments = [f"{setting.name} {setting.value}".strip() for setting in tuning.docker]
    lines = "".join(f"#   {argument}\n" for argument in arguments)
    return (
        _head(tuning)
        + (f"# Arguments of docker run beside --env-file:\n{lines}" if lines else "")
        + "".join(f"# {setting.reason}\n{setting.name}={setting.value}\n" for setting in tuning.environment)
    )


def _head(tuning: Tuning) -> str:
    over = ", over several nodes" if tuning.multi_node else ""
    simulated = " (simulated)" if tuning.simulated else ""
    part = f", {tuning.part.title}" if tuning.part else ""
    program = "".join(
        f"# In the program: {setting.name} {setting.value}: {setting.reason}\n" for setting in tuning.program
    )
    # The host's name comes from the bundle: in a shell's file it must not become a line of its own.
    return (
        f"# gpunode env: {tuning.workload}, {tuning.profile}{over}, {one_line(tuning.host)}{part}{simulated}\n{program}"
    )


def payload_settings() -> dict[str, str]:
    """Return the JSON object for the payload's ``--settings``: ``{"compile_min_capability": "7.0"}``.

    From the newest release with a value in the catalog.
    """
    known = [row for row in load().frameworks.values() if row.compile_min_compute_capability is not None]
    if not known:
        return {}
    newest = max(known, key=lambda row: Number(row.version))
    return {"compile_min_capability": str(newest.compile_min_compute_capability)}
