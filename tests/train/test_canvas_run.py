"""Training of a full-attention model: its loss falls, its export is served, and what measures it
while it trains decodes as the engine does."""

import json
import pathlib
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

import jdllm
from jdllm.checkpoint import source
from jdllm.models import loading
from jdllm.train import __main__, denoise, examples, recipes, step

pytestmark = pytest.mark.campaign  # engines of its own, whose programs take long to compile

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECIPE = ROOT / "configs" / "train" / "nano-canvas.yaml"
TINY = {"d_model": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "mlp_hidden_size": 64}
SETTINGS = {
    "num_steps": 40,
    "decay_share": 0.5,
    "warmup_steps": 3,
    "learning_rate": 3e-3,
    "batch_size": 8,
    "sequence_length": 160,
    "compute_dtype": "float32",
    "log_every": 5,
    "eval_problems": 2,
    "data_threads": 1,
    "data_workers": 0,
}
SEQ = 96  # of denoised rows and the engine: where the canvas ends, the last block being short


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Returns the folder of a run of the shipped recipe, but for its sizes."""
    folder = tmp_path_factory.mktemp("canvas")
    model = folder / "model"
    weights = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(source.bundled_model("jdllm-nano-canvas"), model, ignore=weights)
    hf = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(hf | TINY))
    changes = SETTINGS | {"model_path": str(model)}
    arguments = [f"{key}={value}" for key, value in changes.items()]
    argv = ["--config", str(RECIPE), "--output-dir", str(folder / "run"), "--set", *arguments]
    assert __main__.main(argv) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def engine(run):
    with jdllm.Engine(
        model_path=str(run / "hf"),
        dtype="float32",
        dllm_algorithm="FullAttnMultiBlock,FastDLLM",
        max_running_requests=1,
        context_length=SEQ,
        page_size=16,
        max_total_tokens=2 * SEQ,
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def trained(run):
    """Returns the run's network and weights, and two rows of problems, 160 tokens each."""
    network = step.build_network(json.loads((run / "hf" / "config.json").read_text()), "float32")
    params = loading.load(run / "hf", dtype="float32", show_progress=False).params
    layout = examples.Layout(sequence_length=160, block_size=32, answer_blocks=4)
    return network, params, examples.heldout(examples.ChatFormat(run / "hf"), layout, 2)[1]


def test_the_loss_falls(run):
    lines = [json.loads(line) for line in (run / "curve.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert np.mean(losses[-3:]) < losses[0] - 1.0
    assert lines[-1]["forwards@one_token"] <= SETTINGS["sequence_length"]


def test_the_export_is_served_with_its_chat_template_and_end_tokens(run, engine):
    assert loading.read_spec(run / "hf").diffusion.eos_token_ids == (1, 5)
    messages = [{"role": "user", "content": "Tom has 7 apples."}]
    ids = engine.tokenizer.apply_chat_template(messages)
    chat = examples.ChatFormat(run / "hf")
    assert ids == chat.prompts(["Tom has 7 apples."])[0]
    result = engine.generate(
        input_ids=ids,
        sampling_params={"max_new_tokens": 40, "dllm": {"algorithm": "FullAttnMultiBlock"}},
    )
    ends = [i for i, token in enumerate(result["output_ids"]) if token in (1, 5)]
    if ends:
        assert len(result["output_ids"]) == ends[0] + 1
        assert result["meta_info"]["finish_reason"]["type"] == "stop"
    else:
        assert len(result["output_ids"]) == 40


def test_denoising_while_training_is_what_the_engine_does(trained, engine):
    network, params, batch = trained
    tokens, prompts = batch["tokens"][:, :SEQ], batch["prompt_lens"]
    assert all((SEQ - prompts) % 32)
    denoiser = denoise.denoiser(network, length=SEQ, stop_ids=())

    def denoised(threshold):
        return denoiser(params, tokens, prompts, jnp.float32(threshold))

    blocks = -((prompts - SEQ) // 32)
    one_token = denoised(1.0)
    assert np.array_equal(one_token.forwards, SEQ - prompts)
    _same(engine, tokens, prompts, one_token, 1.0)
    # How sure a network is after 40 steps depends on the problems: the first threshold at which
    # forwards write several tokens, and not whole blocks.
    for threshold in (2.0**-n for n in range(1, 10)):
        several = denoised(threshold)
        if np.all(several.forwards < SEQ - prompts):
            break
    assert np.all((several.forwards < SEQ - prompts) & (several.forwards > blocks)), (
        several.forwards
    )
    _same(engine, tokens, prompts, several, threshold)


def _same(engine, tokens, prompts, rows, threshold):
    """Asserts that the engine writes what the rows of a denoiser hold, in as many forwards."""
    dllm = {"algorithm": "FastDLLM", "threshold": threshold}
    assert not np.any(rows.masked)
    for row, prompt in enumerate(prompts):
        written = np.asarray(rows.tokens)[row]
        assert np.array_equal(written[:prompt], tokens[row, :prompt])
        room = int(SEQ - prompt)
        result = engine.generate(
            input_ids=tokens[row, :prompt].tolist(),
            sampling_params={"max_new_tokens": room, "ignore_eos": True, "dllm": dllm},
        )
        assert result["output_ids"] == written[prompt:].tolist()
        assert result["meta_info"]["nfe"] == int(rows.forwards[row])


def test_a_row_is_done_at_a_stop_token_of_its_last_final_block(trained):
    network, params, batch = trained
    every = tuple(range(network.config.spec.vocab_size))
    rows = denoise.denoiser(network, length=160, stop_ids=every)(
        params, batch["tokens"], batch["prompt_lens"], jnp.float32(2.0)
    )
    assert np.array_equal(rows.forwards, [32, 32])
    for masked, prompt in zip(np.asarray(rows.masked), batch["prompt_lens"], strict=True):
        assert masked.tolist() == [p >= prompt + 32 for p in range(160)]


def test_the_shipped_recipe_and_model_fit_each_other():
    shipped = recipes.load(RECIPE)
    folder = source.resolve(shipped.model_path)
    hf = json.loads((folder / "config.json").read_text())
    network = step.build_network(hf, shipped.compute_dtype)
    assert network.config.spec.diffusion.kind == "canvas"
    assert network.config.spec.head_dim == 64
    chat = examples.ChatFormat(folder)
    assert chat.tokenizer.get_vocab_size() <= network.config.spec.vocab_size
    assert (chat.pad_id, chat.turn_end_id) == (1, 5)
    assert chat.tokenizer.token_to_id("<|mask|>") == network.config.spec.diffusion.mask_token_id
