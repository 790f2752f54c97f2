"""What edits of logits must give, position by position in plain Python, and rows that use them.

`edited` follows docs/algorithms.md. `block_alone` runs one greedy block row over a model that sees
the whole sequence at once: no pages, launches or batches, and none of the runner's code.
"""

import collections
import dataclasses

import numpy as np

NOTHING = -1e5  # no probability in float64, and 0 * NOTHING is 0


@dataclasses.dataclass
class Text:
    """A row as a step sees it: its tokens (None where nothing is written), prompt and suffix."""

    tokens: list
    start: int
    end: int
    ends: tuple = ()

    def context(self, position):
        """Counts the written output tokens before the first end token, without `position`."""
        counts = collections.Counter()
        for place in range(self.start, self.end):
            token = self.tokens[place]
            if token in self.ends:
                break
            if token is not None and place != position:
                counts[token] += 1
        return counts

    @property
    def given(self):
        return {*self.tokens[: self.start], *self.tokens[self.end :]} - {None}


def edited(z, text, position, params):
    """Returns the logits of one position after the edits that `params` (a dict) asks for."""
    z = np.array(z, np.float64)
    counts = text.context(position)
    r = params.get("repetition_penalty", 1.0)
    for token in text.given | set(counts):
        z[token] = z[token] / r if z[token] > 0 else z[token] * r
    for token, count in counts.items():
        z[token] -= params.get("frequency_penalty", 0.0) * count
        z[token] -= params.get("presence_penalty", 0.0)
    for token, bias in params.get("logit_bias", {}).items():
        z[int(token)] += bias
    if "allowed_token_ids" in params:
        banned = set(range(len(z))) - set(params["allowed_token_ids"])
    else:
        banned = set()
    banned |= set(params.get("banned", ()))
    if position < text.start + params.get("min_new_tokens", 0):
        banned |= set(text.ends)
    z[list(banned)] = NOTHING
    return z


def log_softmax(z):
    z = z - z.max()
    return z - np.log(np.exp(z).sum())


def best_tokens(logprob, count, mask):
    order = [
        t for t in np.argsort(-logprob, kind="stable") if t != mask and logprob[t] > NOTHING / 2
    ]
    return [(int(t), float(logprob[t])) for t in order[:count]]


@dataclasses.dataclass
class Written:
    """An output: its tokens, and of each its log-probability and the list of best tokens."""

    ids: list
    logprobs: list
    top: list


def block_alone(logits_of, prompt, params, *, block, mask, count=5):
    """Returns what a greedy row writes; `logits_of(ids)` is [S, V] under block-causal attention."""
    dllm = params["dllm"]
    ends = tuple(params.get("stop_token_ids", ()))
    out = Written([], [], [])
    while True:
        committed = list(prompt) + out.ids
        start = len(committed) // block * block
        head = len(committed) - start
        own = committed[start:] + [None] * (block - head)
        found = {}
        post_edits = 0
        while True:
            ids = committed[:start] + [mask if t is None else t for t in own]
            text = Text(committed[:start] + own, len(prompt), start + block, ends)
            z = np.asarray(logits_of(ids), np.float64)[start:]
            proposals = {}
            for place in range(head, block):
                row = z[place].copy()
                if place > 0:
                    left = ids[start + place - 1]
                    row[left] -= dllm.get("penalty_lambda", 0.0)
                logprob = log_softmax(edited(row, text, start + place, params))
                proposals[place] = best_tokens(logprob, count, mask)
            open_places = [place for place in proposals if own[place] is None]
            sure = {p for p in open_places if np.exp(proposals[p][0][1]) > dllm["threshold"]}
            if open_places and not sure:
                sure = {max(open_places, key=lambda p: (proposals[p][0][1], -p))}
            if dllm["algorithm"] == "JointThreshold":
                post_edits += not open_places
                if not open_places and post_edits > dllm.get("max_post_edit_steps", 16):
                    break
                sure |= {
                    place for place, best in proposals.items()
                    if own[place] is not None and best[0][0] != own[place]
                    and np.exp(best[0][1]) > dllm.get("edit_threshold", 0.0)
                }  # fmt: skip
            if not sure:
                break
            for place in sure:
                own[place] = proposals[place][0][0]
                found[place] = proposals[place]
        for place in range(head, block):
            out.ids.append(own[place])
            out.logprobs.append(found[place][0][1])
            out.top.append(found[place])
            if own[place] in ends or len(out.ids) == params["max_new_tokens"]:
                return out
