"""Requests of full-canvas models for tests: whatever a batch of them may hold."""

import dataclasses

import numpy as np

MASK, VOCAB, CONTEXT = 240, 256, 64  # of the tiny checkpoints, and of engines over them


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ask:
    """One request. `dllm` names the algorithm and its options; `ends` are its end tokens.

    `more` are further sampling options.
    """

    prompt: list
    wanted: int
    dllm: dict
    suffix: tuple = ()
    given: dict = dataclasses.field(default_factory=dict)
    ends: tuple = ()
    temperature: float = 0.0
    seed: int = 0
    more: dict = dataclasses.field(default_factory=dict)

    @property
    def params(self):
        return {
            "max_new_tokens": self.wanted,
            "temperature": self.temperature,
            "seed": self.seed,
            "stop_token_ids": list(self.ends),
            "ignore_eos": True,
            "return_logprob": True,
            "return_step_map": True,
            "dllm": self.dllm,
        } | self.more

    @property
    def canvas(self):
        """The whole canvas, None where a token is to be written."""
        count = self.wanted
        length = self.dllm.get("block_length", 1 if self.dllm["algorithm"] == "Dream" else 32)
        if not self.suffix:
            count = min(-(-count // length) * length, CONTEXT - len(self.prompt))
        places = [self.given.get(place) for place in range(count)]
        return [*self.prompt, *places, *self.suffix]

    @property
    def end(self):
        return len(self.canvas) - len(self.suffix)


MULTI = {"algorithm": "FullAttnMultiBlock", "block_length": 8, "threshold": 1.0}
DELAYED = MULTI | {"cache_mode": "delayed", "cache_delay_iter": 1, "refresh_interval": 7}
WINDOW = MULTI | {"cache_mode": "window", "cache_delay_iter": 2, "refresh_interval": 5}
FAST = {"algorithm": "FastDLLM", "threshold": 0.5, "block_length": 8}
DUAL = FAST | {"cache_mode": "dual"}
SLOW = {"algorithm": "EntropyThreshold", "threshold": 0.0, "block_length": 8}  # a token a step
# Everything that a batch may hold, by family; of each (dLLM options, temperature).
MIXES = {
    "llada": [
        (MULTI, 0.0),
        (DELAYED, 0.0),
        (WINDOW, 0.0),
        (MULTI | {"cache_mode": "window", "block_length": 5, "threshold": 2.0}, 0.9),
        ({"algorithm": "EntropyThreshold", "threshold": 1.2, "block_length": 12}, 0.0),
        ({"algorithm": "LLaDA", "block_length": 8}, 0.0),
        ({"algorithm": "LLaDA", "block_length": 4, "cfg_scale": 0.8}, 0.0),
        ({"algorithm": "LLaDA", "block_length": 8, "remasking": "random"}, 0.7),
        (FAST | {"cache_mode": "prefix"}, 0.0),
        (DUAL, 0.0),
        (FAST | {"factor": 1.0, "threshold": None}, 1.0),
    ],
    "dream": [
        (MULTI, 0.0),
        (DELAYED, 0.6),
        (WINDOW, 0.0),
        ({"algorithm": "Dream", "steps": 9}, 0.0),
        ({"algorithm": "Dream", "steps": 7, "alg": "entropy", "alg_temp": 0.3}, 0.5),
        (DUAL, 0.0),
        (FAST | {"cache_mode": "prefix"}, 0.0),
    ],
}
GREEDY = {
    family: [dllm for dllm, temperature in mix if not temperature and "cache_mode" in dllm]
    for family, mix in MIXES.items()
}


def random_ids(rng, low, high):
    """Returns ids that are not the mask, which a prompt may hold but rarely does."""
    ids = rng.integers(0, VOCAB, rng.integers(low, high))
    return np.where(ids == MASK, 0, ids).tolist()


def mixed_asks(family, seed):
    rng = np.random.default_rng(seed)
    asks = []
    for i, (dllm, temperature) in enumerate(MIXES[family]):
        block, prompt = dllm.get("block_length", 1), random_ids(rng, 1, 25)
        wanted = int(rng.integers(1, 32))
        if dllm["algorithm"] == "LLaDA":
            wanted = -(-wanted // block) * block
        suffix = random_ids(rng, 1, 7) if i % 3 == 2 else []
        given = {int(place): int(rng.integers(0, MASK)) for place in range(0, wanted, 6) if i % 4}
        asks.append(
            Ask(prompt=prompt, wanted=wanted, dllm=dllm, temperature=temperature, seed=i,
                suffix=tuple(suffix), given=given)
        )  # fmt: skip
    return asks


def cached_ask(family, rng):
    """Returns a greedy ask of a random cached mode, with anything that changes its windows."""
    dllm = GREEDY[family][rng.integers(len(GREEDY[family]))]
    dllm = dllm | {"block_length": int(rng.choice([4, 7, 8, 16]))}
    if dllm["algorithm"] == "FullAttnMultiBlock":
        dllm |= {
            "threshold": float(rng.uniform(0.3, 3.0)),
            "block_add_threshold": float(rng.choice([0.1, 0.5, 1.0])),
            "cache_delay_iter": int(rng.integers(0, 4)),
            "refresh_interval": int(rng.choice([3, 5, 1000])),
        }
    return Ask(
        prompt=random_ids(rng, 1, 20),
        wanted=int(rng.integers(12, 39)),
        dllm=dllm,
        suffix=tuple(random_ids(rng, 1, 5) if rng.random() < 0.25 else []),
        given={3: 7, 11: 9} if rng.random() < 0.25 else {},
        ends=tuple(rng.integers(0, MASK, 2).tolist()),
    )
