"""Reads the folder of an image pipeline: which components it has, their configs and weights.

    model_index.json                       the class of the pipeline, and of each component
    generation_config.json                 options of requests that do not say (may be missing)
    scheduler/scheduler_config.json
    tokenizer/                             tokenizer.json, tokenizer_config.json
    text_encoder/                          config.json, model*.safetensors
    transformer/, vae/                     config.json, diffusion_pytorch_model*.safetensors

`read` finds all faults of a folder and reports them in one error, before any weight is read: a
checkpoint's header tells whether it fits. A component may also be a converted checkpoint
(`jdllm.convert`), or have no weights at all (`load_format="dummy"`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jdllm import errors
from jdllm.checkpoint import (
    assemble,
    orbax_checkpoint,
    safetensors_source,
    source,
    weight_files,
    weight_table,
)
from jdllm.device import devices
from jdllm.models import hf_config, loading, random_weights, split
from jdllm.models.images import component, registry
from jdllm.models.images import split as image_split
from jdllm.models.images.quantization import quantize, read_as
from jdllm.options.config import Quantization
from jdllm.pipelines import flow_schedule, interface, prompts, request_defaults
from jdllm.pipelines import registry as pipelines

logger = logging.getLogger(__name__)

_SCHEDULER = "scheduler"
_CLASS_KEY = "_class_name"
_USE_FP8 = ", with --quantization fp8 if memory is short"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadedComponent:
    """A component as `loading.merge` takes it, and its config; over a mesh it is that of a rank."""

    graphdef: nnx.GraphDef
    params: loading.Params
    config: Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Safetensors files that fit a component: which tensors fill each parameter."""

    tensors: safetensors_source.SafetensorsSource
    fills: Mapping[str, list[weight_table.Fill]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A component with weights; `checkpoint` is None unless `load_format` is "safetensors".

    `base_name` is what the library that wrote the component calls its safetensors files. `variant`:
    that of the weights which are read, None for those without one.
    """

    name: str
    base_name: str
    path: pathlib.Path
    component: component.Component[Any]
    config: Any
    hf_config: Mapping[str, Any]
    load_format: str
    variant: str | None = None
    checkpoint: Checkpoint | None = None

    @property
    def stored_dtype(self) -> str:
        """The dtype of the weights on disk; of a dummy, the one in config.json or bfloat16."""
        if self.checkpoint is not None:
            fills = itertools.chain.from_iterable(self.checkpoint.fills.values())
            return self.checkpoint.tensors.main_dtype(fill.tensor for fill in fills).name
        if self.load_format == "orbax":
            return orbax_checkpoint.stored_dtype(self.path)
        return loading.resolve_dtype("auto", self.hf_config).name

    def abstract(
        self,
        dtype: jnp.dtype,
        *,
        quantization: Quantization | None = None,
        tp_size: int = 1,
    ) -> tuple[nnx.GraphDef, dict[str, jax.ShapeDtypeStruct]]:
        """Returns what `Component.abstract` does of the component that each rank has."""
        config = image_split.local_config(self.config, tp_size)
        return self.component.abstract(config, dtype, quantization=quantization)

    def load(
        self,
        dtype: DTypeLike = "auto",
        *,
        quantization: Quantization | None = None,
        seed: int = 0,
        show_progress: bool = True,
        mesh: Mesh | None = None,
    ) -> LoadedComponent:
        """Returns the component with its parameters on the default device, or over a mesh.

        "auto" is the dtype of the weights on disk. The weights of a dummy are drawn from `seed`.
        With a `quantization` the weights that the component names for it are quantised, one by one.
        """
        is_auto = isinstance(dtype, str) and dtype == "auto"
        resolved = loading.resolve_dtype(self.stored_dtype if is_auto else dtype, {})
        graphdef, shapes = self.abstract(resolved, quantization=quantization)
        arrays = read_as(shapes)
        place = None
        if mesh is not None:
            tp_size = mesh.devices.size
            cuts = image_split.cuts(self.config, arrays, tp_size)
            place = split.Placement(cuts=cuts, mesh=mesh)
            graphdef, _ = self.abstract(resolved, quantization=quantization, tp_size=tp_size)
        if self.checkpoint is not None:
            read = assemble.each(
                self.checkpoint.tensors,
                self.checkpoint.fills,
                arrays,
                place=place or assemble.on_default_device,
                show_progress=show_progress,
                desc=f"loading {self.name}",
            )
        elif self.load_format == "orbax" and place is not None:
            read = orbax_checkpoint.restore_placed_each(self.path, arrays, place)
        elif self.load_format == "orbax":
            read = orbax_checkpoint.restore_each(self.path, arrays, devices.used())
        else:
            read = random_weights.each(arrays, seed=seed, place=place)
        params = quantize(read, shapes, place)
        return LoadedComponent(graphdef=graphdef, params=params, config=self.config)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PipelineFolder:
    """A folder without faults; `models` and `tokenizers` have the names of `model_index.json`."""

    path: pathlib.Path
    class_name: str
    schedule: flow_schedule.FlowSchedule
    models: Mapping[str, ModelFolder]
    tokenizers: Mapping[str, prompts.PromptTokenizer]
    request_defaults: Mapping[str, Any]

    @property
    def component_names(self) -> tuple[str, ...]:
        """The folders of all components."""
        return (*self.models, *self.tokenizers, _SCHEDULER)

    def load(
        self,
        dtypes: Mapping[str, DTypeLike],
        *,
        quantization: Quantization | None = None,
        seed: int = 0,
        show_progress: bool = True,
        mesh: Mesh | None = None,
    ) -> dict[str, LoadedComponent]:
        """Returns the components that `dtypes` names, each in its dtype or "auto"."""
        return {
            name: self.models[name].load(
                dtype,
                quantization=quantization,
                seed=seed,
                show_progress=show_progress,
                mesh=mesh,
            )
            for name, dtype in dtypes.items()
        }


def read(
    directory: pathlib.Path, *, load_format: str = "auto", variant: str | None = None
) -> PipelineFolder:
    """Returns what a folder holds; reads configs, tokenizers and the headers of weight files.

    Raises one ConfigError with the faults of all components, each with component, file and key.
    With load_format "dummy" no weight file is read, and a missing tokenizer folder has a stand-in.
    A component that has weights of the `variant` is read from these, another without, as diffusers
    does.
    """
    if variant is not None and load_format == "dummy":
        raise errors.ConfigError(
            f"variant={errors.quote(variant)} names weights, and load_format='dummy' reads none; "
            "leave one of them out"
        )
    index = source.read_json(directory / source.MODEL_INDEX_NAME)
    check_index(index, directory)
    class_name = index[_CLASS_KEY]
    layout = pipelines.PIPELINES[class_name].layout
    reader = _Reader(directory, index, load_format, variant)
    reader.check_names({*layout.models, *layout.tokenizers, _SCHEDULER})
    bare = {name: reader.model(name, classes) for name, classes in layout.models.items()}
    found = [model for model in bare.values() if model is not None]
    reader.check_variant(found)
    models = [reader.with_weights(model) for model in found]
    tokenizers = {
        name: reader.tokenizer(name, place, bare[place.encoder])
        for name, place in layout.tokenizers.items()
    }
    schedule = reader.schedule()
    defaults = reader.request_defaults()
    reader.report()
    assert schedule is not None, "a missing schedule is a fault"
    return PipelineFolder(
        path=directory,
        class_name=class_name,
        schedule=schedule,
        models={model.name: model for model in models if model is not None},
        tokenizers={name: one for name, one in tokenizers.items() if one is not None},
        request_defaults=defaults,
    )


def check_index(index: Mapping[str, Any], directory: pathlib.Path) -> None:
    """Raises a ConfigError for a `model_index.json` of a class that is not served."""
    class_name = index.get(_CLASS_KEY)
    if not isinstance(class_name, str) or class_name not in pipelines.PIPELINES:
        raise errors.ConfigError(
            f"{directory / source.MODEL_INDEX_NAME}: {_CLASS_KEY}={errors.quote(class_name)} is "
            f"not supported; supported: {', '.join(pipelines.PIPELINES)}"
        )


class _Reader:
    """Reads one component after the other and collects the faults of all."""

    def __init__(
        self,
        directory: pathlib.Path,
        index: Mapping[str, Any],
        load_format: str,
        variant: str | None,
    ):
        self._directory = directory
        self._index = index
        self._load_format = load_format
        self._variant = variant
        self._faults: list[str] = []

    def report(self) -> None:
        """Raises if there was any fault."""
        if self._faults:
            count = f"{len(self._faults)} fault{'s' if len(self._faults) > 1 else ''}"
            lines = [fault.replace("\n", "\n    ") for fault in self._faults]
            raise errors.ConfigError(
                "\n  ".join([f"{self._directory} is no complete pipeline, {count}:", *lines])
            )

    def check_names(self, known: set[str]) -> None:
        """Finds components that the pipeline class does not have; [null, null] means none."""
        for name, value in self._index.items():
            if not name.startswith("_") and name not in known and value not in (None, [None, None]):
                self._faults.append(
                    f"{source.MODEL_INDEX_NAME}: {errors.quote(name)}={errors.quote(value)} is no "
                    f"component of this pipeline{errors.nearest(name, known)}"
                )

    def model(self, name: str, class_names: tuple[str, ...]) -> ModelFolder | None:
        """Returns a component without its checkpoint, None after a fault."""
        with self._collect(name):
            library, class_name = self._class_of(name, class_names)
            one, path = registry.COMPONENTS[class_name], self._directory / name
            hf = source.read_json(path / source.CONFIG_NAME)
            _check_class(hf, one.class_names + one.file_class_names)
            hf_config.refuse_quantised(hf, _USE_FP8)
            base_name = weight_files.BASE_NAMES[library]
            found = weight_files.variants_in(path, base_name)
            return ModelFolder(
                name=name,
                base_name=base_name,
                variant=self._variant if self._variant in found else None,
                path=path,
                component=one,
                config=one.read(hf),
                hf_config=hf,
                load_format=loading.resolve_load_format(path, self._load_format),
            )
        return None

    def check_variant(self, models: Sequence[ModelFolder]) -> None:
        """Finds a variant that no component has, and logs which ones are read without it."""
        others = [model.name for model in models if model.variant != self._variant]
        if self._variant is not None and models and len(others) == len(models):
            there = {one.name: weight_files.variants_in(one.path, one.base_name) for one in models}
            self._faults.append(weight_files.without(self._variant, there))
        elif others:
            text = "no variant %s of %s: the weights without a variant are read"
            logger.warning(text, self._variant, " and ".join(others))

    def with_weights(self, model: ModelFolder) -> ModelFolder | None:
        """Returns a component whose weights on disk fit it, None after a fault."""
        with self._collect(model.name):
            match model.load_format:
                case "safetensors":
                    tensors = safetensors_source.SafetensorsSource(
                        model.path, base_name=model.base_name, variant=model.variant
                    )
                    fills = model.component.match(
                        model.config, tensors.shapes, tensors.unread_dtypes
                    )
                    checkpoint = Checkpoint(tensors=tensors, fills=fills)
                    return dataclasses.replace(model, checkpoint=checkpoint)
                case "orbax":
                    dtype = jnp.dtype(jnp.float32)  # only names and shapes are compared
                    arrays = model.component.abstract(model.config, dtype)[1]
                    orbax_checkpoint.check(model.path, arrays)
            return model
        return None

    def tokenizer(
        self, name: str, place: interface.TokenizerPlace, encoder: ModelFolder | None
    ) -> prompts.PromptTokenizer | None:
        """Returns a tokenizer, None after a fault."""
        path = self._directory / name
        # The faults of a tokenizer are found even if those of its encoder hide its vocabulary.
        vocab_size = hf_config.LARGEST_SIZE if encoder is None else encoder.config.vocab_size
        with self._collect(name):
            self._class_of(name, place.class_names)
            if self._load_format == "dummy" and not path.is_dir():
                return place.stand_in(vocab_size=vocab_size)
            return place.read(path, vocab_size=vocab_size)
        return None

    def schedule(self) -> flow_schedule.FlowSchedule | None:
        """Returns the schedule, None after a fault."""
        with self._collect(_SCHEDULER):
            self._class_of(_SCHEDULER, (flow_schedule.CLASS_NAME,))
        with self._collect(_SCHEDULER):
            path = self._directory / _SCHEDULER / flow_schedule.FILE_NAME
            return flow_schedule.read(source.read_json(path))
        return None

    def request_defaults(self) -> Mapping[str, Any]:
        """Returns the options that the folder gives, none without the file or after a fault."""
        path = self._directory / request_defaults.FILE_NAME
        if path.exists():  # a folder of this name is a fault, too
            with self._collect(request_defaults.FILE_NAME):
                return request_defaults.read(path)
        return {}

    def _class_of(self, name: str, class_names: tuple[str, ...]) -> tuple[str, str]:
        """Returns library and class of a component; the class is one of `class_names`."""
        match self._index.get(name):
            case [str(library), str(class_name)]:
                if class_name in class_names and library in weight_files.BASE_NAMES:
                    return library, class_name
        raise errors.ConfigError(
            f"{source.MODEL_INDEX_NAME}: {name}={errors.quote(self._index.get(name))} must be a "
            f"class of {' or '.join(weight_files.BASE_NAMES)}: {' or '.join(class_names)}"
        )

    @contextlib.contextmanager
    def _collect(self, name: str) -> Iterator[None]:
        try:
            yield
        except (errors.ConfigError, OSError) as error:
            self._faults.append(f"{name}: {error}")


def _check_class(hf: Mapping[str, Any], class_names: tuple[str, ...]) -> None:
    """Raises if config.json is that of another class than `model_index.json` says."""
    for key in (_CLASS_KEY, "architectures"):
        named = hf.get(key)
        names = named if isinstance(named, list) else [named]
        if named is not None and not set(class_names).intersection(map(str, names)):
            raise errors.ConfigError(
                f"{source.CONFIG_NAME}: {key}={errors.quote(named)} must name "
                f"{' or '.join(class_names)}"
            )
