"""What no family uses yet (post-norms, kinds of attention, own ends) against numpy formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jdllm import spec
from jdllm.layers import attention, mlp, rope
from jdllm.models import decoder, decoder_config

T, D, V, EPS = 10, 12, 20, 1e-6
ATOL = 2e-5  # float32 rounding of two layers on values of order one
# Layers differ in everything that a kind of attention may differ in.
NEAR = attention.AttentionConfig(
    dim=D,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=4,
    rope=rope.RopeConfig(rotary_dim=4, theta=100.0),
    window=3,
)
FAR = attention.AttentionConfig(
    dim=D,
    num_query_heads=2,
    num_kv_heads=1,
    head_dim=8,
    rope=rope.RopeConfig(rotary_dim=4, theta=5000.0),
    qk_norm_eps=EPS,
)
WIDTHS = (6, 10)


def config_of(*, has_post_norms):
    layers = tuple(
        decoder_config.LayerConfig(
            attention=kind,
            feed_forward=mlp.MLPConfig(width=width),
            has_post_norms=has_post_norms,
        )
        for kind, width in zip((NEAR, FAR), WIDTHS)
    )
    return decoder_config.DecoderConfig(
        spec=spec.ModelSpec(
            architecture="Toy",
            model_type="toy",
            vocab_size=V,
            hidden_size=D,
            num_layers=2,
            num_query_heads=4,
            num_kv_heads=2,
            head_dim=4,
            max_position_embeddings=64,
            diffusion=spec.DiffusionSpec(block_size=2, mask_token_id=0, eos_token_ids=(1,)),
            rotary_dim=4,
        ),
        layers=layers,
        rms_norm_eps=EPS,
        tie_word_embeddings=False,
    )


def toy(*, has_post_norms=True, kind=decoder.Decoder):
    """Returns a model with random parameters, and these as numpy arrays by path."""
    model = kind(config_of(has_post_norms=has_post_norms), dtype=jnp.float32)
    rng = np.random.default_rng(0)
    params = {}
    for path, leaf in nnx.to_flat_state(nnx.state(model)):
        drawn = rng.normal(size=leaf.shape).astype(np.float32)
        array = 1 + 0.3 * drawn if drawn.ndim == 1 else drawn * D**-0.5
        params[".".join(map(str, path))] = array
        leaf[...] = jnp.asarray(array)
        nnx.update(model, nnx.from_flat_state([(path, leaf)]))
    return model, params


def rms(x, weight):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight


def rotated(x, kind):
    half = kind.rope.rotary_dim // 2
    out = x.copy()
    for t in range(len(x)):
        for j in range(half):
            angle = t * kind.rope.theta ** (-j / half)
            a, b = x[t, :, j], x[t, :, j + half]
            out[t, :, j] = a * np.cos(angle) - b * np.sin(angle)
            out[t, :, j + half] = b * np.cos(angle) + a * np.sin(angle)
    return out


def attended(h, kind, mask, at):
    N, K, H = kind.num_query_heads, kind.num_kv_heads, kind.head_dim
    qkv = (h @ at["w_qkv"].T).reshape(T, N + 2 * K, H)
    q, k, v = qkv[:, :N], qkv[:, N : N + K], qkv[:, N + K :]
    if kind.qk_norm_eps is not None:
        q, k = rms(q, at["query_layernorm.weight"]), rms(k, at["key_layernorm.weight"])
    q, k = rotated(q, kind), rotated(k, kind)
    out = np.zeros_like(q)
    for t in range(T):
        for n in range(N):
            scores = np.where(mask[t], k[:, n * K // N] @ q[t, n] / np.sqrt(H), -np.inf)
            weights = np.exp(scores - scores.max())
            out[t, n] = weights / weights.sum() @ v[:, n * K // N]
    return out.reshape(T, -1) @ at["w_out"].T


def numpy_hidden(params, x, *, has_post_norms):
    """Returns the hidden states after the final norm, and what each feed-forward reads."""
    place, reads = np.arange(T), []
    near = np.abs(place[:, None] - place) < 3
    for i, (kind, mask) in enumerate(((NEAR, near), (FAR, np.ones((T, T), bool)))):
        under = f"layers.{i}."
        at = {p.removeprefix(under): a for p, a in params.items() if p.startswith(under)}
        attention_at = {p.removeprefix("attention."): a for p, a in at.items()}
        h = rms(x, at["input_layernorm.weight"])
        added = attended(h, kind, mask, attention_at)
        x = x + (rms(added, at["attention_post_norm.weight"]) if has_post_norms else added)
        h = rms(x, at["post_attention_layernorm.weight"])
        reads.append(h)
        gate, up = np.split(h @ at["mlp.w_gate_up"].T, 2, axis=1)
        added = (gate / (1 + np.exp(-gate)) * up) @ at["mlp.w_down"].T
        x = x + (rms(added, at["mlp_post_norm.weight"]) if has_post_norms else added)
    return rms(x, params["norm.weight"]), reads


def attend_of():
    mask = attention.visibility_mask(T, 2, "full")
    near = attention.visibility_mask(T, 2, "full", window=3)
    return attention.dense_attend(mask, 1, of_windows={3: near})


TOKENS = np.arange(T) * 7 % V


@pytest.mark.parametrize("has_post_norms", [False, True])
def test_layers_of_two_kinds_equal_numpy(has_post_norms):
    model, params = toy(has_post_norms=has_post_norms)
    hidden, caches = model(
        jnp.asarray(TOKENS), jnp.arange(T), attend=attend_of(), caches=[None, None]
    )
    expected, _ = numpy_hidden(
        params, params["word_embeddings"][TOKENS], has_post_norms=has_post_norms
    )
    np.testing.assert_allclose(hidden, expected, atol=ATOL)
    assert caches == [None, None]
    assert ("layers.1.mlp_post_norm.weight" in params) == has_post_norms


def test_a_layer_with_a_window_needs_a_mask_for_it():
    model, _ = toy()
    attend = attention.dense_attend(np.ones((T, T), bool), 1)
    with pytest.raises(ValueError, match="no mask for window=3"):
        model(jnp.asarray(TOKENS), jnp.arange(T), attend=attend, caches=[None, None])


def test_a_feed_forward_of_the_caller_s_sees_every_layer_in_order():
    model, params = toy()
    seen = []

    def feed_forward(module, x, valid):
        seen.append((x, valid))
        return decoder.run_feed_forward(module, x, valid)

    valid = jnp.arange(T) < 8
    model(
        jnp.asarray(TOKENS),
        jnp.arange(T),
        attend=attend_of(),
        caches=[None, None],
        valid=valid,
        feed_forward=feed_forward,
    )
    _, reads = numpy_hidden(params, params["word_embeddings"][TOKENS], has_post_norms=True)
    assert len(seen) == len(reads)
    for (x, given), expected in zip(seen, reads):
        np.testing.assert_allclose(x, expected, atol=ATOL)
        assert given is valid


class OwnEnds(decoder.Decoder):
    """Scaled embeddings and soft-capped logits, as Gemma's families have them."""

    def embed(self, tokens, positions):
        return super().embed(tokens, positions) * 3.0

    def mix(self, weights):
        return super().mix(weights) * 3.0

    def logits(self, hidden):
        return 2.0 * jnp.tanh(super().logits(hidden) / 2.0)


def test_a_family_may_have_its_own_ends():
    model, params = toy(kind=OwnEnds)
    table, head = params["word_embeddings"], params["lm_head"]
    positions = jnp.arange(T)
    hidden, _ = model(jnp.asarray(TOKENS), positions, attend=attend_of(), caches=[None, None])
    expected, _ = numpy_hidden(params, 3.0 * table[TOKENS], has_post_norms=True)
    np.testing.assert_allclose(hidden, expected, atol=ATOL)
    capped = 2.0 * np.tanh(expected @ head.T / 2.0)
    np.testing.assert_allclose(model.logits(hidden), capped, atol=5 * ATOL)


def test_mixtures_of_tokens_enter_as_tokens_do():
    model, params = toy(kind=OwnEnds)
    rng = np.random.default_rng(1)
    weights = jax.nn.softmax(jnp.asarray(rng.normal(size=(T, V)), jnp.float32))
    x = model.mix(weights)
    hidden, _ = model.run_layers(x, jnp.arange(T), attend=attend_of(), caches=[None, None])
    mixed = 3.0 * np.asarray(weights) @ params["word_embeddings"]
    expected, _ = numpy_hidden(params, mixed, has_post_norms=True)
    np.testing.assert_allclose(hidden, expected, atol=ATOL)
    one_hot = jax.nn.one_hot(jnp.asarray(TOKENS), V)
    np.testing.assert_array_equal(model.mix(one_hot), model.embed(jnp.asarray(TOKENS), None))
