"""The payload with a real TensorFlow: on logical processors where there is no GPU.

python3 -m venv /tmp/tf && /tmp/tf/bin/pip install tensorflow-cpu
GPUNODE_TENSORFLOW_PYTHON=/tmp/tf/bin/python pytest tests/integration/test_payload_tensorflow.py
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpunode.facts.models.workload import (
    Record,
    TensorflowRunValues,
    TensorflowTrainingValues,
    TensorflowValues,
    values_of,
)

PYTHON = os.environ.get("GPUNODE_TENSORFLOW_PYTHON")
pytestmark = pytest.mark.skipif(PYTHON is None, reason="GPUNODE_TENSORFLOW_PYTHON names no Python with TensorFlow")
DAMAGED = """
import json, sys
sys.path.insert(0, sys.argv[1])
from gpunode.workload.payload import tf
module = tf.ready()
cpus = module.config.list_physical_devices("CPU")
module.config.set_logical_device_configuration(cpus[0], [module.config.LogicalDeviceConfiguration()] * 3)
places = ["/CPU:0", "/CPU:1", "/CPU:2"]
plain = tf.MirroredNetwork._gradients

def not_reduced(self, inputs):
    with module.GradientTape() as tape:
        loss = self.loss(self.weights, inputs)
    return tape.gradient(loss, self.weights)

def one_is_wrong(self, inputs):
    here = module.distribute.get_replica_context().replica_id_in_sync_group
    return [one + module.where(module.equal(here, 2), 1e-3, 0.0) for one in plain(self, inputs)]

class NoXla:
    def __getattr__(self, name):
        return getattr(module, name)
    def function(self, work=None, jit_compile=False):
        raise RuntimeError("libdevice not found at ./libdevice.10.bc")

for gradients in (plain, not_reduced, one_is_wrong):
    tf.MirroredNetwork._gradients = gradients
    print(json.dumps(tf.MirroredNetwork(module, places, on_gpus=False).compared()))
print(json.dumps(tf.xla(NoXla(), places[0])))
"""


def answer(*words: str | Path) -> list[Any]:
    done = subprocess.run(
        [str(PYTHON), *map(str, words)],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
        env={**os.environ, "TF_GPU_THREAD_MODE": "gpu_private"},
        start_new_session=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_part_of_tensorflow_runs(archive: Path) -> None:
    *lines, _ = answer(archive, "--tests", "versions,frameworks")
    records = {record.record: record for record in map(Record.model_validate, lines)}
    values = {}
    for name, kind in (
        ("versions.tensorflow", TensorflowValues),
        ("frameworks.tensorflow", TensorflowRunValues),
        ("frameworks.tensorflow-training", TensorflowTrainingValues),
    ):
        assert (records[name].error, records[name].skipped, records[name].undetermined) == (None, None, None)
        values[name] = values_of(records[name], kind)
        assert isinstance(values[name], kind), values[name]
    training: Any = values["frameworks.tensorflow-training"]
    assert training.ranks >= 1 + (records["frameworks.tensorflow-training"].device == "cpu")
    assert (training.wrong, training.xla_error) == (0, None)
    assert training.xla_max_error == 0
    assert training.max_gradient_error < 1e-4
    assert training.thread_mode == "gpu_private"
    assert training.input_samples_per_second > 0


def test_what_is_wrong_is_found(archive: Path) -> None:
    """Of three devices: gradients that stay where they are, one device that adds to its own; XLA without its files."""
    good, not_reduced, one_wrong, xla = answer("-c", DAMAGED, archive)
    assert good[1] == 0
    assert good[0] < 1e-4
    assert not_reduced[1] == 9
    assert one_wrong[1] == 3
    assert min(not_reduced[0], one_wrong[0]) > 1e-4
    assert xla["xla_error"] == "RuntimeError: libdevice not found at ./libdevice.10.bc"
    assert xla["xla_max_error"] is None
