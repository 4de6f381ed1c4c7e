"""Settings in the formats of the programs that read them."""

import shlex
from collections.abc import Sequence

from gpunode.text import one_line
from gpunode.tuning.model import Setting, Tuning


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
