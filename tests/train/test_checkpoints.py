"""Checkpoints of a run when the disk is full, or when they are damaged."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.full_disk import largest_file

from jdllm import errors
from jdllm.train import __main__ as train_main
from jdllm.train import checkpoints, loop


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    step: jax.Array
    params: dict[str, jax.Array]
    average: dict[str, jax.Array]


def state(number):
    # Random numbers, which the checkpoint cannot compress below the limit of a file.
    drawn = jnp.asarray(np.random.default_rng(number).normal(size=100_000), jnp.float32)
    return State(step=jnp.asarray(number), params={"w": drawn}, average={"w": -drawn})


# Of tensorstore: writes that still run when the first one has failed find their loop closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_checkpoint_that_finds_no_room_is_an_error_and_the_one_before_is_resumed(tmp_path):
    saved = checkpoints.manager(tmp_path)
    checkpoints.save_now(saved, state(1))
    with (
        largest_file(50_000),
        pytest.raises(checkpoints.WriteError, match=f"checkpoint in {tmp_path}: .*newest"),
    ):
        checkpoints.save_now(saved, state(2))
    again = checkpoints.manager(tmp_path)
    restored = checkpoints.restore(again, state(0))
    assert restored is not None and int(restored.step) == 1
    assert np.array_equal(restored.params["w"], state(1).params["w"])
    checkpoints.save_now(again, state(2))  # there is room again
    restored = checkpoints.restore(checkpoints.manager(tmp_path), state(0))
    assert restored is not None and int(restored.step) == 2


DAMAGES = {
    "an empty folder": lambda step: shutil.rmtree(step / "default"),
    "a missing file": lambda step: (step / "default" / "_METADATA").unlink(),
    "a file cut short": lambda step: (step / "default" / "manifest.ocdbt").write_bytes(b"\1"),
    "missing numbers": lambda step: shutil.rmtree(step / "default" / "ocdbt.process_0"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_checkpoint_that_is_damaged_is_named(tmp_path, damage):
    saved = checkpoints.manager(tmp_path)
    for number in (1, 2):
        checkpoints.save_now(saved, state(number))
    saved.close()
    DAMAGES[damage](tmp_path / "2")
    with pytest.raises(errors.ConfigError, match=f"checkpoint {tmp_path}/2 is damaged: ") as found:
        checkpoints.restore(checkpoints.manager(tmp_path), state(0))
    assert "\n" not in str(found.value)
    # What the message says helps.
    shutil.rmtree(tmp_path / "2")
    restored = checkpoints.restore(checkpoints.manager(tmp_path), state(0))
    assert restored is not None and int(restored.step) == 1


def test_the_command_says_so_in_one_line(tmp_path, monkeypatch, capfd):
    def fails(*_):
        raise checkpoints.WriteError("cannot write a checkpoint in runs/x")

    monkeypatch.setattr(loop, "train", fails)
    config = tmp_path / "recipe.yaml"
    config.write_text("model_path: x\n")
    assert train_main.main(["--config", str(config)]) == 1
    assert capfd.readouterr().err == ("jdllm train: error: cannot write a checkpoint in runs/x\n")
