"""Settings as the programs read them that they are for."""

import shlex

from gpunode.tuning.model import Tuning


def docker_args(tuning: Tuning) -> list[str]:
    """Arguments for ``docker run``, the environment among them; none of them needs quoting in a shell."""
    words = [word for setting in tuning.docker for word in (setting.name, setting.value) if word]
    for setting in tuning.environment:
        words += ["--env", f"{setting.name}={setting.value}"]
    return words


def shell(tuning: Tuning) -> str:
    """For ``eval`` or a file that a shell reads: each variable below its reason."""
    return _head(tuning) + "".join(
        f"# {setting.reason}\nexport {setting.name}={_quoted(setting.value)}\n" for setting in tuning.environment
    )


def _quoted(value: str) -> str:
    # zsh takes a word behind = for the name of a program.
    return f"'{value}'" if value.startswith("=") and "'" not in value else shlex.quote(value)


def env_file(tuning: Tuning) -> str:
    """For ``docker run --env-file``: no quotes there, and nothing behind a value. Its other arguments are comments."""
    arguments = [f"{setting.name} {setting.value}".strip() for setting in tuning.docker]
    told = "".join(f"#   {argument}\n" for argument in arguments)
    return (
        _head(tuning)
        + (f"# Arguments of docker run beside --env-file:\n{told}" if told else "")
        + "".join(f"# {setting.reason}\n{setting.name}={setting.value}\n" for setting in tuning.environment)
    )


def _head(tuning: Tuning) -> str:
    over = ", over several nodes" if tuning.multi_node else ""
    simulated = " (simulated)" if tuning.simulated else ""
    # A bundle says what its host is called: in a file that a shell reads that must not become a line of its own.
    host = "".join(character for character in tuning.host if character.isprintable())
    return f"# gpunode env: {tuning.workload}{over}, {host}{simulated}\n"
