"""What the host expects of a row's windows; the device decides them (`decoding/`)."""

from __future__ import annotations

from jdllm.scheduler import request as request_lib


def first_window(request: request_lib.Request, forwards: int) -> int:
    """Returns how many tokens the second to (1 + `forwards`)-th forward of a row should take.

    Only a block that ends within these forwards makes one take more. All of the request's options
    must be given.
    """
    dllm, canvas = request.sampling.dllm, request.canvas_ids
    start, length = len(request.prompt_ids), len(canvas)
    if dllm.forwards_whole_canvas:
        return length
    rest, block_length = length - start, dllm.block_length or length
    if dllm.cache_mode == "dual":
        return min(rest, block_length)
    if dllm.cache_mode == "prefix":
        return rest
    # FullAttnMultiBlock: the prompt is cached after `cache_delay_iter` forwards.
    interval = dllm.refresh_interval or 1
    if (dllm.cache_delay_iter or 0) > 1 or (1 + forwards) // interval > 1 // interval:
        return length
    first_open = next((place for place, token in enumerate(canvas) if token < 0), start)
    written = first_open - start
    if dllm.cache_mode == "delayed":
        # Blocks that were there already are cached one after the other, between full forwards.
        return rest if written < block_length else length
    blocks = 1 + forwards + (dllm.block_add_threshold == 0)  # at most one more each forward
    return min(rest, written + blocks * block_length)
