"""What the serving of images knows of a pipeline; a class of pipelines is one file beside this one.

A pipeline says which components it has and what the kinds of launches compute: captions,
modulation, velocities, their guidance, images. It sees arrays of rows, and neither slots nor
requests. Its numbers (sizes, dtypes) come from the configs of its components.

Letters: R rows, L tokens of a padded caption, H and W sides of an image in pixels.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Protocol, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float32, Int32

from jdllm import errors
from jdllm.models import loading
from jdllm.models.images import step_cache
from jdllm.pipelines import flow_schedule, prompts, request_defaults

Params = Mapping[str, jax.Array]  # of all components: the name of each begins its parameters'
Captions = Any  # a tree of arrays [R, ...], see `Pipeline.caption_shapes`
Modulation = Any  # a tree of arrays [R, ...], see `ModulationAhead`
Size = tuple[int, int]  # (height, width) of an image in pixels

# What the versions of transformers call the class of one tokenizer: of any, and of Qwen2's.
ANY_TOKENIZER = ("PreTrainedTokenizerFast", "TokenizersBackend")
QWEN2_TOKENIZERS = ("Qwen2Tokenizer", "Qwen2TokenizerFast", *ANY_TOKENIZER)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerPlace:
    """The place of a tokenizer: its classes, and the model whose vocabulary its ids are of.

    `read` gets the folder and the `vocab_size`, `stand_in` the `vocab_size` alone.
    """

    class_names: tuple[str, ...]
    encoder: str
    read: Callable[..., prompts.PromptTokenizer] = prompts.ChatTokenizer
    stand_in: Callable[..., prompts.PromptTokenizer] = prompts.ByteTokenizer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a folder of one pipeline class holds: the classes that may stand in each place."""

    models: Mapping[str, tuple[str, ...]]
    tokenizers: Mapping[str, TokenizerPlace]

    @property
    def text_encoders(self) -> frozenset[str]:
        """The components that only captions need."""
        return frozenset(place.encoder for place in self.tokenizers.values())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What a request gets that does not say; the sides are in pixels.

    A scale of None says that the pipeline has no such option. `longest_sequence_length` is the
    largest `max_sequence_length` that a request may ask for.
    """

    height: int
    width: int
    num_inference_steps: int
    guidance_scale: float | None
    max_sequence_length: int
    longest_sequence_length: int
    true_cfg_scale: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Which options of guidance requests have.

    `cfg_switch` is the one that asks for a second forward, with the negative prompt; None: there is
    no negative prompt. `has_cfg_limits`: there are `cfg_truncation` and `cfg_normalization`.
    `has_step_cache`: `predict` takes a cache, and steps may leave out most of the transformer.
    """

    cfg_switch: Literal["guidance_scale", "true_cfg_scale"] | None
    has_cfg_limits: bool = False
    has_step_cache: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a pipeline is built from: all of its loaded components but their weights.

    `dtype` is that of all weights. `request_defaults` are those that the folder gives.
    """

    graphdefs: Mapping[str, nnx.GraphDef]
    configs: Mapping[str, Any]
    schedule: flow_schedule.FlowSchedule
    dtype: jnp.dtype
    request_defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def defaults(self, of_class: Defaults) -> Defaults:
        """Returns the defaults of a pipeline class, or those that the folder gives instead.

        Raises a ConfigError for an option that the class does not have.
        """
        scale = self.request_defaults.get("guidance_scale")
        if scale is not None and of_class.guidance_scale is None:
            raise errors.ConfigError(
                f"{request_defaults.FILE_NAME}: guidance_scale={scale} is no option of this model"
            )
        return dataclasses.replace(of_class, **self.request_defaults)

    def module(self, name: str, params: Params) -> Any:
        """Returns a component with its weights, inside a traced function."""
        prefix = prefix_of(name)
        own = {
            path.removeprefix(prefix): array
            for path, array in params.items()
            if path.startswith(prefix)
        }
        return loading.merge(self.graphdefs[name], own)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Guidance:
    """Options of guided rows, by the names of `ImageParams`."""

    guidance_scale: Float32[Any, " R"]
    true_cfg_scale: Float32[Any, " R"]
    cfg_truncation: Float32[Any, " R"]
    cfg_normalization: Float32[Any, " R"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModulationAhead:
    """What modulates the blocks in a step and is made before it, for several steps at once.

    `make` (params, sigma [R], captions, guidance) returns it for rows at these noise levels; it is
    traced. `shapes` are those of one row and step, without rows. `by_caption`: captions have a part
    in it, so both forwards of a guided row have their own; else it is one for both, and `make` does
    not read captions.
    """

    make: Callable[[Params, Float32[Array, " R"], Captions, Guidance], Modulation]
    shapes: Modulation
    by_caption: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of one row and step."""
        leaves = jax.tree.leaves(self.shapes)
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


class Pipeline(Protocol):
    """A loaded pipeline without its weights.

    Latents are float32 in the shape that the published pipeline takes; with sides that are
    multiples of `size_multiple`, the elements of a latent are in proportion to the pixels.
    `encode`, `predict`, `guide` and `decode` are traced. They treat every row as if it were alone.
    """

    layout: ClassVar[Layout]
    options: ClassVar[Options]

    @classmethod
    def build(cls, parts: Parts) -> Self:
        """Returns the pipeline of these components."""
        ...

    @property
    def parts(self) -> Parts:
        """What the pipeline was built from."""
        ...

    @property
    def defaults(self) -> Defaults:
        """What requests get that do not say."""
        ...

    @property
    def size_multiple(self) -> int:
        """Pixels of which both sides of an image are multiples."""
        ...

    @property
    def max_side(self) -> int:
        """Pixels of the longest side that the model has positions for."""
        ...

    @property
    def caption_multiple(self) -> int:
        """Tokens of which the compiled lengths of captions are multiples."""
        ...

    @property
    def max_caption_tokens(self) -> int:
        """Tokens of the longest compiled length of a caption."""
        ...

    @property
    def prefix_tokens(self) -> int:
        """Ids at the beginning of every caption that only text encoders see.

        They come on top of `max_sequence_length`, and of the multiple and the most tokens above.
        """
        ...

    @property
    def pads_captions(self) -> bool:
        """Whether captions are padded to their `max_sequence_length`, because pads count."""
        ...

    def prompt_tokenizer(
        self, tokenizers: Mapping[str, prompts.PromptTokenizer]
    ) -> prompts.PromptTokenizer:
        """Returns what makes the ids of captions, from the tokenizers of the folder."""
        ...

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """Returns the shape of the latents of an image of so many pixels."""
        ...

    def image_tokens(self, height: int, width: int) -> int:
        """Returns how many tokens an image has in the transformer, without padding."""
        ...

    @property
    def transformer_width(self) -> int:
        """The numbers of one token inside the transformer."""
        ...

    def sigmas(self, num_steps: int, height: int, width: int) -> Float32[Any, " num_steps+1"]:
        """Returns the noise levels before each step, and the last one, 0 (numpy)."""
        ...

    def caption_shapes(self, tokens: int) -> Any:
        """Returns the shapes (without rows) of what is kept of a caption of a compiled length.

        The length counts the prefix, as `lens` below do.
        No axis shrinks when `tokens` grows. A shorter caption is the beginning of each axis.
        """
        ...

    def encode(
        self, params: Params, ids: Int32[Array, "R L"], lens: Int32[Array, " R"]
    ) -> Captions:
        """Returns what is kept of captions: what steps need that is the same in all of them."""
        ...

    @property
    def modulation(self) -> ModulationAhead | None:
        """What of the modulation is made before a step; None: `predict` makes all of it."""
        ...

    def predict(
        self,
        params: Params,
        latents: Float32[Array, "R ..."],
        sigma: Float32[Array, " R"],
        captions: Captions,
        lens: Int32[Array, " R"],
        guidance: Guidance,
        size: Size,
        modulation: Modulation | None = None,
        cache: step_cache.StepCache | None = None,
    ) -> Float32[Array, "R ..."]:
        """Returns velocities (noise - clean) of latents at the noise levels `sigma`.

        `lens` are the numbers of ids of the captions, `size` is that of all images. `modulation` is
        what was made for these levels, captions and guidance, if the pipeline has it made before. A
        `cache` comes only if there is a step cache; its tokens are those of the image, without
        padding.
        """
        ...

    def guide(
        self,
        positive: Float32[Array, "R ..."],
        negative: Float32[Array, "R ..."],
        sigma: Float32[Array, " R"],
        guidance: Guidance,
    ) -> Float32[Array, "R ..."]:
        """Returns the velocities to step with, from those of the prompt and of the negative one."""
        ...

    def decode(
        self, params: Params, latents: Float32[Array, "R ..."], size: Size
    ) -> Float32[Array, "R H W 3"]:
        """Returns the images of this size of latents, about -1 to 1 and not clipped."""
        ...


def prefix_of(component: str) -> str:
    """Returns how the names of a component's parameters begin in `Params`."""
    return f"{component}."
