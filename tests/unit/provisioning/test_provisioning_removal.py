"""What the roles for containers, CUDA and DCGM remove is what their pages name as theirs."""

import pytest
from node_samples import collection_root, node, planned


@pytest.mark.parametrize("role", ["docker", "nvidia_container_toolkit", "cuda", "dcgm"])
@pytest.mark.parametrize("dnf", [False, True], ids=["apt", "dnf"])
def test_every_file_that_a_role_removes_is_named_in_its_readme(role: str, dnf: bool) -> None:
    readme = (collection_root() / "roles" / role / "README.md").read_text(encoding="utf-8")
    texts = {f"/var/lib/gpunode/{role}/packages-before": "bash\n"}
    manifest = planned(role, node(dnf=dnf, texts=texts), state="absent")
    paths = [each.path for each in manifest.files if each.content is None]
    assert len(paths) > 2
    assert [path for path in paths if path not in readme and path.rpartition("/")[0] + "/" not in readme] == []
    assert manifest.due
