"""The simulated container toolkit: configurations are merged, specifications name what the node has, hooks stay in."""

import importlib
import io
import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from simulated import output_of, write
from simulated_node import DRIVER, SimulatedNode, node  # noqa: F401

from gpunode.lab.simulator import cdi, container_runtime, ctk
from gpunode.lab.simulator.entry_points import TOOLS, script


def ask(*words: str) -> str:
    """Stdout of an nvidia-ctk that succeeds."""
    code, text = output_of(ctk.main, *words)
    assert code == 0
    return text


class TestRuntimeConfiguration:
    def test_docker_keeps_what_is_there(self, node: SimulatedNode) -> None:  # noqa: F811
        write(node.root, "etc/docker/daemon.json", {"log-driver": "journald", "runtimes": {"own": {"path": "/own"}}})
        ask("runtime", "configure", "--runtime=docker", "--set-as-default", "--cdi.enabled")
        assert json.loads((node.root / "etc/docker/daemon.json").read_text(encoding="utf-8")) == {
            "default-runtime": "nvidia",
            "features": {"cdi": True},
            "log-driver": "journald",
            "runtimes": {"own": {"path": "/own"}, "nvidia": {"args": [], "path": "nvidia-container-runtime"}},
        }

    def test_a_dry_run_writes_nothing(self, node: SimulatedNode) -> None:  # noqa: F811
        shown = ask("runtime", "configure", "--dry-run")
        assert json.loads(shown)["runtimes"]["nvidia"]["path"] == "nvidia-container-runtime"
        assert not (node.root / "etc/docker").exists()

    def test_another_name_path_and_file(self, node: SimulatedNode) -> None:  # noqa: F811
        words = ("--nvidia-runtime-name", "gpu", "--nvidia-runtime-path=/opt/r", "--config", "/other.json")
        ask("runtime", "configure", "--runtime", "docker", *words)
        written = json.loads((node.root / "other.json").read_text(encoding="utf-8"))
        assert written == {"runtimes": {"gpu": {"args": [], "path": "/opt/r"}}}

    @pytest.mark.parametrize("text", ["{", "[]", '"text"'])
    def test_an_invalid_daemon_json_is_left_alone(self, node: SimulatedNode, text: str) -> None:  # noqa: F811
        file = node.root / "etc/docker/daemon.json"
        file.parent.mkdir(parents=True)
        file.write_text(text, encoding="utf-8")
        assert ctk.main(["runtime", "configure", "--runtime=docker"]) == 1
        assert file.read_text(encoding="utf-8") == text

    def test_containerd_before_drop_ins(self, node: SimulatedNode, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
        monkeypatch.setenv("GPUNODE_LAB_PACKAGE_VERSION", "1.17.8")
        file = node.root / "etc/containerd/config.toml"
        file.parent.mkdir(parents=True)
        file.write_text('version = 2\n[grpc]\n  address = "/run/x"\n', encoding="utf-8")
        ask("runtime", "configure", "--runtime=containerd")
        written = tomllib.loads(file.read_text(encoding="utf-8"))
        assert written["grpc"]["address"] == "/run/x"
        runtimes = written["plugins"]["io.containerd.grpc.v1.cri"]["containerd"]["runtimes"]
        assert runtimes["nvidia"]["options"]["BinaryName"] == "/usr/bin/nvidia-container-runtime"
        assert not (node.root / "etc/containerd/conf.d").exists()

    def test_containerd_with_drop_ins(self, node: SimulatedNode, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
        monkeypatch.setenv("GPUNODE_LAB_PACKAGE_VERSION", "1.18.1")
        file = node.root / "etc/containerd/config.toml"
        file.parent.mkdir(parents=True)
        file.write_text('version = 3\nimports = ["/etc/own.toml"]\n', encoding="utf-8")
        ask("runtime", "configure", "--runtime=containerd", "--set-as-default", "--cdi.enabled")
        main = tomllib.loads(file.read_text(encoding="utf-8"))
        assert main == {"version": 3, "imports": ["/etc/own.toml", "/etc/containerd/conf.d/*.toml"]}
        drop_in = tomllib.loads((node.root / "etc/containerd/conf.d/99-nvidia.toml").read_text(encoding="utf-8"))
        plugin = drop_in["plugins"]["io.containerd.cri.v1.runtime"]
        assert (plugin["enable_cdi"], plugin["containerd"]["default_runtime_name"]) == (True, "nvidia")
        before = file.read_bytes()
        ask("runtime", "configure", "--runtime=containerd", "--set-as-default", "--cdi.enabled")
        assert file.read_bytes() == before

    def test_a_drop_in_repeats_the_section_that_it_replaces(
        self,
        node: SimulatedNode,  # noqa: F811
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("GPUNODE_LAB_PACKAGE_VERSION", "1.18.1")
        file = node.root / "etc/containerd/config.toml"
        file.parent.mkdir(parents=True)
        runc = '[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]\nSystemdCgroup = true\n'
        file.write_text(f"version = 2\n{runc}", encoding="utf-8")
        ask("runtime", "configure", "--runtime=containerd")
        drop_in = tomllib.loads((node.root / "etc/containerd/conf.d/99-nvidia.toml").read_text(encoding="utf-8"))
        runtimes = drop_in["plugins"]["io.containerd.grpc.v1.cri"]["containerd"]["runtimes"]
        assert runtimes["runc"]["options"] == {"SystemdCgroup": True}
        assert runtimes["nvidia"]["options"] == {
            "SystemdCgroup": True,
            "BinaryName": "/usr/bin/nvidia-container-runtime",
        }

    @pytest.mark.usefixtures("node")
    def test_what_is_not_a_runtime(self) -> None:
        assert ctk.main(["runtime", "configure", "--runtime=lxc"]) == 1
        assert ctk.main(["runtime", "configure", "--frobnicate"]) == 1
        assert ctk.main(["frobnicate"]) == 3


def test_toml_comes_back_as_it_was() -> None:
    document = {"a": 1, "b": [1, "x"], "c": {"d-e": True, "f.g": {"h": 'quote " and \\'}}}
    assert tomllib.loads(ctk.toml(document)) == document


class TestSpecification:
    def test_it_names_gpus_and_files_of_the_node(self, node: SimulatedNode) -> None:  # noqa: F811
        node.lay("l40s-4")
        spec = yaml.safe_load(ask("cdi", "generate"))
        uuids = [gpu["uuid"] for gpu in node.hardware["gpus"]]
        assert [device["name"] for device in spec["devices"]] == [
            *(name for index, uuid in enumerate(uuids) for name in (str(index), uuid)),
            "all",
        ]
        nodes = spec["devices"][-1]["containerEdits"]["deviceNodes"]
        assert [entry["path"] for entry in nodes] == [f"/dev/nvidia{minor}" for minor in range(4)]
        mounted = {entry["hostPath"] for entry in spec["containerEdits"]["mounts"]}
        libraries = f"/usr/lib/{os.uname().machine}-linux-gnu"
        assert {f"{libraries}/libcuda.so.{DRIVER}", f"{libraries}/libnvidia-ml.so.{DRIVER}"} <= mounted
        assert all((node.root / path.lstrip("/")).exists() for path in mounted)
        assert spec == json.loads(ask("cdi", "generate", "--format=json"))

    @pytest.mark.parametrize(
        ("version", "flags", "spec_version"),
        [
            ("1.17.8", (), "0.5.0"),
            ("1.19.1", (), "0.7.0"),
            ("1.19.1", ("--feature-flag", cdi.NO_GIDS), "0.5.0"),
            ("1.20.0", (), "0.7.0"),
        ],
    )
    def test_additional_groups_by_the_toolkits_version(
        self,
        node: SimulatedNode,  # noqa: F811
        monkeypatch: pytest.MonkeyPatch,
        version: str,
        flags: tuple[str, ...],
        spec_version: str,
    ) -> None:
        node.lay("l40s-4")
        (node.root / "etc/group").write_text("root:x:0:\nvideo:x:44:\n", encoding="utf-8")
        monkeypatch.setenv("GPUNODE_LAB_PACKAGE_VERSION", version)
        spec = yaml.safe_load(ask("cdi", "generate", *flags))
        assert spec["cdiVersion"] == spec_version
        groups = {tuple(device["containerEdits"].get("additionalGids", ())) for device in spec["devices"]}
        assert groups == {(44,) if spec_version == "0.7.0" else ()}

    def test_the_units_environment_counts(self, node: SimulatedNode, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
        node.lay("t4-1")
        (node.root / "etc/group").write_text("video:x:44:\n", encoding="utf-8")
        monkeypatch.setenv("GPUNODE_LAB_PACKAGE_VERSION", "1.20.0")
        monkeypatch.setenv("NVIDIA_CTK_CDI_OUTPUT_FILE_PATH", "/var/run/cdi/nvidia.yaml")
        monkeypatch.setenv("NVIDIA_CTK_CDI_GENERATE_FEATURE_FLAGS", cdi.NO_GIDS)
        assert ask("cdi", "generate") == ""
        written = yaml.safe_load((node.root / "var/run/cdi/nvidia.yaml").read_text(encoding="utf-8"))
        assert written["cdiVersion"] == "0.5.0"
        names = [f"nvidia.com/gpu={name}" for name in ("0", node.hardware["gpus"][0]["uuid"], "all")]
        assert ask("cdi", "list").splitlines() == sorted(names)

    def test_a_mismatch_makes_none(self, node: SimulatedNode) -> None:  # noqa: F811
        node.lay("l40s-4")
        node.library("580.178.04")
        assert ctk.main(["cdi", "generate", "--output=/etc/cdi/nvidia.yaml"]) == 1
        assert not (node.root / "etc/cdi").exists()


class TestHook:
    @pytest.fixture(name="rootfs")
    def make_rootfs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        root = tmp_path / "bundle/rootfs"
        root.mkdir(parents=True)
        (tmp_path / "bundle/config.json").write_text(json.dumps({"root": {"path": "rootfs"}}), encoding="utf-8")
        reported = json.dumps({"bundle": str(tmp_path / "bundle"), "pid": 1})
        monkeypatch.setattr("sys.stdin", io.StringIO(reported))
        return root

    def test_links_are_made_in_the_container(self, rootfs: Path) -> None:
        assert container_runtime.cdi_hook(["create-symlinks", "--link", "libcuda.so.1::/usr/lib/libcuda.so"]) == 0
        assert (rootfs / "usr/lib/libcuda.so").readlink() == Path("libcuda.so.1")

    def test_a_link_out_of_the_container_is_refused(self, rootfs: Path, tmp_path: Path) -> None:
        (rootfs / "usr").symlink_to(tmp_path)
        assert container_runtime.cdi_hook(["create-symlinks", "--link", "x::/usr/evil"]) == 1
        assert not (tmp_path / "evil").is_symlink()

    def test_no_state_is_a_failure(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO("nothing"))
        assert container_runtime.cdi_hook(["create-symlinks", "--link", "x::/y"]) == 1


class TestRuntime:
    def config(self, devices: str | None) -> dict[str, Any]:
        env = ["PATH=/bin", *([f"NVIDIA_VISIBLE_DEVICES={devices}"] if devices is not None else [])]
        prestart = [{"path": "/usr/bin/nvidia-container-runtime-hook", "args": ["x", "prestart"]}]
        return {"process": {"env": env}, "mounts": [], "hooks": {"prestart": prestart}, "root": {"path": "rootfs"}}

    def test_a_container_that_asks_gets_driver_and_hooks(self, node: SimulatedNode) -> None:  # noqa: F811
        node.lay("l40s-4")
        config = self.config("1")
        assert container_runtime.with_gpus(config)
        targets = [mount["destination"] for mount in config["mounts"]]
        assert f"/usr/lib/{os.uname().machine}-linux-gnu/libcuda.so.{DRIVER}" in targets
        assert config["hooks"]["prestart"] == []
        assert [hook["args"][1] for hook in config["hooks"]["createContainer"]] == [
            "create-symlinks",
            "enable-cuda-compat",
            "update-ldcache",
            "disable-device-node-modification",
        ]

    @pytest.mark.parametrize("devices", [None, "", "void"])
    def test_one_that_does_not_ask_is_left_alone(self, node: SimulatedNode, devices: str | None) -> None:  # noqa: F811
        node.lay("l40s-4")
        config = self.config(devices)
        before = json.dumps(config)
        assert not container_runtime.with_gpus(config)
        assert json.dumps(config) == before

    def test_gpus_by_index_uuid_and_device_name(self, node: SimulatedNode) -> None:  # noqa: F811
        node.lay("l40s-4")
        uuid = node.hardware["gpus"][2]["uuid"]
        for devices, expected in (("all", [0, 1, 2, 3]), ("0,3", [0, 3]), (uuid, [2]), ("none", [])):
            assert [gpu.index for gpu in container_runtime.chosen(devices) or []] == expected
        assert [gpu.index for gpu in container_runtime.chosen("runtime.nvidia.com/gpu=2") or []] == [2]
        with pytest.raises(container_runtime.UnknownDeviceError, match="unknown device"):
            container_runtime.chosen("7")

    def test_nvidia_container_cli_lists(self, node: SimulatedNode) -> None:  # noqa: F811
        node.lay("t4-1")
        reported = container_runtime.info()
        assert f"NVRM version:   {DRIVER}" in reported
        assert node.hardware["gpus"][0]["uuid"] in reported


def test_every_tool_has_its_function_and_a_script_that_compiles() -> None:
    for tool, target in TOOLS.items():
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(f"gpunode.lab.simulator.{module}"), function or "main")), tool
        compile(script(tool), tool, "exec")
