"""The computable model of `hash_model.py` for families whose context is causal.

K,V of written tokens are computed one by one, each from those before it. Requests of even seeds
write by drafts, of which a causal forward accepts the right ones; those of odd seeds write blocks,
whose first token comes from the causal forward before them.
"""

import numpy as np
from support.hash_model import (
    MASK,
    PLACE,
    B,
    PagedModel,
    block_kv,
    committed_block,
    ends_at,
    next_token,
    scramble,
    step,
)

from jdllm.scheduler.batch import RowResult


def causal_kv(context, token):
    """Returns K,V of one token behind its context."""
    seen = (context * PLACE[: len(context)]).sum()
    return scramble(seen + np.array([token + 7], np.uint64) * PLACE[len(context)])


def causal_kvs(context, tokens):
    """Returns K,V of context and tokens, and for each token the one that follows it."""
    found = []
    for token in tokens:
        context = np.concatenate([context, causal_kv(context, token)])
        found.append(next_token(context))
    return context, found


def drafts(one):
    return one.seed % 2 == 0


def draft(context, last):
    """Returns a block: the last token and guesses, about half of which are right."""
    tokens = [last]
    while len(tokens) < B:
        right = causal_kvs(context, tokens)[1][-1]
        guesses = scramble(context.sum(keepdims=True) + np.uint64(len(tokens) + 31 * last))
        tokens.append(right if guesses[0] % np.uint64(2) else 4)
    return tokens


def accepted(tokens, found):
    """Returns the tokens that a causal forward of the block `tokens` writes."""
    count = 1
    while count < len(tokens) and tokens[count] == found[count - 1]:
        count += 1
    return found[:count]


class CausalBlock:
    """The block in flight of a slot whose context is causal; `tokens` are those that are known."""

    def __init__(self, owner, start, tokens, is_written):
        self.owner, self.start, self.tokens, self.is_written = owner, start, tokens, is_written
        self.masked, self.step = np.arange(B) >= len(tokens), 0

    def padded(self):
        return np.array((self.tokens + [MASK] * B)[:B], np.int32)

    def denoise(self, one, visible):
        """Runs a step that sees K,V of the whole block; returns the block if it is output."""
        if drafts(one):
            self.tokens, self.is_written = draft(visible[: self.start], self.tokens[0]), True
            return []
        tokens, self.masked, self.is_written, *_ = step(
            "persist", visible, self.padded(), self.masked, self.masked, one.seed, self.step
        )
        self.tokens, self.step = tokens.tolist(), self.step + 1
        return self.tokens if self.is_written else []

    def following(self, one, found):
        """Returns the next block, which begins with a token of the causal forward."""
        count = len(accepted(self.tokens, found)) if drafts(one) else len(self.tokens)
        return CausalBlock(self.owner, self.start + count, [found[count - 1]], B == 1)


def alone(one):
    """Returns (output ids, forwards) of a request served by itself where the context is causal."""
    *before, last = one.prompt_ids
    kv, output, forwards = causal_kvs(np.zeros(0, np.uint64), before)[0], [], 0
    block = CausalBlock(one.request_id, len(before), [last], True)
    while True:
        forwards += 1
        if block.is_written:
            whole, found = causal_kvs(kv, block.tokens)
            output += accepted(block.tokens, found) if drafts(one) else []
            block = block.following(one, found)
            kv = whole[: block.start]
        else:
            scratch = block_kv(kv, block.padded(), block.start)
            output += block.denoise(one, np.concatenate([kv, scratch]))
        length = ends_at(output, one)
        if length is not None:
            return output[:length], forwards


class CausalModel(PagedModel):
    """Executes batches on a store of pages exactly as the rows say."""

    def prefill(self, row):
        stop = row.start + row.num_tokens
        self.write_causal(row.request, row.start, row.request.tokens(row.start, stop))

    def write_causal(self, one, start, tokens):
        """Writes K,V of tokens in place and returns the one that follows each of them."""
        assert start // self.page_size >= len(one.stay.prefix_nodes), "wrote a shared page"
        whole, found = causal_kvs(self.store[self.slots(one, 0, start)], tokens)
        self.store[self.slots(one, start, len(whole))] = whole[start:]
        return found

    def decode(self, row, max_steps):
        """Runs up to `max_steps` forwards of a row whose context is causal."""
        one = row.request
        if row.is_fresh:
            head = one.tokens(row.start, one.num_tokens)
            assert len(head) == 1, "all other tokens are prefilled"
            self.blocks[one.stay.slot] = CausalBlock(one.request_id, row.start, head, True)
        block, committed, nfe = self.blocks[one.stay.slot], [], 0
        assert block.owner == one.request_id, "another row's slot"
        capacity = len(one.stay.pages) * self.page_size
        while nfe < max_steps and block.start + B <= capacity:
            nfe += 1
            if not block.is_written:
                new = block.denoise(one, self.write_block(one, block.start, block.padded()))
                committed += [committed_block(np.array(new, np.int32), nfe)] if new else []
                continue
            found = self.write_causal(one, block.start, block.tokens)
            new = accepted(block.tokens, found) if drafts(one) else []
            committed += [committed_block(np.array(new, np.int32), nfe)] if new else []
            block = block.following(one, found)
        self.blocks[one.stay.slot] = block
        return RowResult(committed=tuple(committed), context_len=block.start, nfe=nfe, num_edited=0)
