"""The tags of the playbooks and roles."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from gpunode.errors import UsageError
from gpunode.provisioning.role import role_tags
from gpunode.text import did_you_mean, nearest
from gpunode.yaml_file import LOADER

SPECIAL_TAGS = frozenset({"all", "always", "never", "tagged", "untagged"})
"""Tags with a meaning of their own in Ansible."""


def refuse_unknown_tags(root: Path, tags: Sequence[str]) -> None:
    """Raise UsageError for a tag that does not exist: Ansible runs nothing for it and reports success."""
    if not tags:
        return
    known = SPECIAL_TAGS.union(
        *(_tags(file) for file in (*root.glob("playbooks/*.yml"), *root.glob("roles/*/*/*.yml"))),
        # The common tasks have those of every role.
        *(role_tags(path.parts[-3]) for path in root.glob("roles/*/meta/main.yml")),
    )
    for tag in (argument.strip() for value in tags for argument in value.split(",") if argument.strip()):
        if tag not in known:
            near = did_you_mean(nearest(tag, known, likeness=0.5))
            hint = near or f"known: {', '.join(sorted(known - SPECIAL_TAGS))}"
            raise UsageError(f"no task has the tag {tag}; {hint}")


def _tags(file: Path) -> set[str]:
    """Return all tags in a playbook or a file of tasks, at every level; ``--list-tags`` omits included files."""

    def walk(node: yaml.Node | None) -> Iterator[str]:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                yield from _tag_names(value) if key.value == "tags" else walk(value)
        elif isinstance(node, yaml.SequenceNode):
            for item in node.value:
                yield from walk(item)

    try:
        return set(walk(yaml.compose(file.read_text(encoding="utf-8"), Loader=LOADER)))
    except yaml.YAMLError as err:
        raise UsageError(f"{file} is not valid YAML: reinstall gpunode: {str(err).splitlines()[0]}") from None


def _tag_names(node: yaml.Node) -> Iterator[str]:
    scalars = node.value if isinstance(node, yaml.SequenceNode) else [node]
    for scalar in scalars:
        yield from (name.strip() for name in str(scalar.value).split(",") if name.strip())
