"""Checkpoints of a run when the disk is full, or when they are damaged."""

import dataclasses
import gc
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from support.full_disk import largest_file

from jdllm import errors
from jdllm.train import __main__, checkpoints, clock, loop

PASSED = clock.Passed(run=90.5, stage=30.0)


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
    checkpoints.save_now(saved, state(1), PASSED)
    with (
        largest_file(50_000),
        pytest.raises(checkpoints.WriteError, match=f"checkpoint in {tmp_path}: .*newest"),
    ):
        checkpoints.save_now(saved, state(2), PASSED)
    again = checkpoints.manager(tmp_path)
    restored = checkpoints.restore(again, state(0))
    assert restored is not None and int(restored.step) == 1
    assert np.array_equal(restored.params["w"], state(1).params["w"])
    checkpoints.save_now(again, state(2), PASSED)  # there is room again
    restored = checkpoints.restore(checkpoints.manager(tmp_path), state(0))
    assert restored is not None and int(restored.step) == 2


def test_a_checkpoint_keeps_the_time_that_its_run_has_taken(tmp_path, caplog):
    saved = checkpoints.manager(tmp_path)
    assert checkpoints.passed(saved) == clock.Passed(run=0, stage=0)
    checkpoints.save_now(saved, state(1), PASSED)
    checkpoints.save_now(saved, state(2), clock.Passed(run=99.0, stage=38.5))
    assert checkpoints.passed(checkpoints.manager(tmp_path)) == clock.Passed(run=99.0, stage=38.5)
    # Where the last one is lost, the time is that of the one before.
    saved.delete(2)
    assert checkpoints.passed(checkpoints.manager(tmp_path)) == PASSED
    # Checkpoints were written without it.
    saved.save(3, args=ocp.args.StandardSave(state(3)))
    saved.wait_until_finished()
    caplog.set_level("INFO", logger="jdllm.train.checkpoints")
    assert checkpoints.passed(checkpoints.manager(tmp_path)) == clock.Passed(run=0, stage=0)
    assert "checkpoint 3 does not say how long its run took: minutes begin anew" in caplog.text


DAMAGES = {
    "an empty folder": lambda step: shutil.rmtree(step / "default"),
    "a missing file": lambda step: (step / "default" / "_METADATA").unlink(),
    "a file cut short": lambda step: (step / "default" / "manifest.ocdbt").write_bytes(b"\1"),
    "missing numbers": lambda step: shutil.rmtree(step / "default" / "ocdbt.process_0"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_checkpoint_that_is_damaged_is_named(tmp_path, damage, caplog):
    # Reads that orbax has given up log their errors as they are collected.
    caplog.set_level("CRITICAL", logger="asyncio")
    saved = checkpoints.manager(tmp_path)
    for number in (1, 2):
        checkpoints.save_now(saved, state(number), PASSED)
    saved.close()
    DAMAGES[damage](tmp_path / "2")
    with pytest.raises(
        errors.ConfigError, match=f"checkpoint {tmp_path}/2 cannot be read: "
    ) as found:
        checkpoints.restore(checkpoints.manager(tmp_path), state(0))
    assert "\n" not in str(found.value)
    del found
    gc.collect()
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
    assert __main__.main(["--config", str(config)]) == 1
    assert capfd.readouterr().err == ("jdllm train: error: cannot write a checkpoint in runs/x\n")
