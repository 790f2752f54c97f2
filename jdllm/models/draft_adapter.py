"""An adapter for drafts in a folder beside the weights of a checkpoint, stored as PEFT does.

Its arrays are parameters of the model, but only if the folder is there and the adapter is asked
for. The model computes drafts with them (`Decoder.__call__`), and everything else without.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

import jax

from jdllm import errors
from jdllm.checkpoint import assemble, safetensors_source, source, weight_table
from jdllm.models import adapter_config, decoder_config, table

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model"
_HINT = "disable_draft_adapter makes drafts without it"

Fills = Mapping[str, Sequence[weight_table.Fill]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftAdapter:
    """Where a family has its adapter: a folder, and the module that projects attention's output.

    `layers` and `module` are the names that checkpoints give the list of layers, and the module in
    a layer. No other module can have an adapter.
    """

    folder: str
    layers: str
    module: str

    def is_in(self, directory: pathlib.Path) -> bool:
        """Returns whether a checkpoint has the adapter."""
        return (directory / self.folder).is_dir()

    def attach(
        self, config: decoder_config.DecoderConfig, directory: pathlib.Path
    ) -> decoder_config.DecoderConfig:
        """Returns the config of the model with the adapter of a checkpoint, whose weights it needs.

        Raises a ConfigError for what is not implemented.
        """
        file = f"{self.folder}/{CONFIG_NAME}"
        try:
            found = source.read_json(directory / self.folder / CONFIG_NAME)
            parsed = adapter_config.parse(found, file, len(config.layers))
            self._check_targets(parsed, file, len(config.layers))
        except errors.ConfigError as error:
            raise errors.ConfigError(f"{error}; {_HINT}") from error
        layers = (
            dataclasses.replace(layer.attention, out_adapter=parsed.of_module(self._path(i), i))
            for i, layer in enumerate(config.layers)
        )
        return dataclasses.replace(
            config,
            layers=tuple(
                dataclasses.replace(layer, attention=attention)
                for layer, attention in zip(config.layers, layers, strict=True)
            ),
        )

    def match(
        self, config: decoder_config.DecoderConfig, shapes: table.Shapes, directory: pathlib.Path
    ) -> tuple[safetensors_source.SafetensorsSource, Fills]:
        """Returns the tensors of a checkpoint's adapter, and which of them fill which parameters.

        `config` is what `attach` returned, `shapes` are those of all parameters. Raises a
        ConfigError if the file does not fit them, or is torn.
        """
        module = f"base_model.model.{{layer}}.{self.module}"
        rows = f"""
            {module}.lora_A.weight   {{layer}}.attention.out_adapter.down
            {module}.lora_B.weight   {{layer}}.attention.out_adapter.up
        """
        weights = table.WeightTable(layers=self.layers, rows=rows)
        try:
            tensors = safetensors_source.SafetensorsSource(
                directory / self.folder, base_name=WEIGHTS_NAME
            )
            fills = weight_table.match(
                weights.expand(config, shapes), tensors.shapes, unread_dtypes=tensors.unread_dtypes
            )
            return tensors, fills
        except errors.ConfigError as error:
            raise errors.ConfigError(f"{self.folder}: {error}\n{_HINT}") from error

    def load(
        self,
        config: decoder_config.DecoderConfig,
        arrays: table.Shapes,
        directory: pathlib.Path,
        place: assemble.Place = assemble.on_default_device,
    ) -> dict[str, jax.Array]:
        """Returns the parameters of the adapter, of their dtypes in `arrays`, as `place` puts them.

        `arrays` are all parameters of the model (path -> shape, dtype).
        """
        tensors, fills = self.match(config, arrays, directory)
        wanted = {path: arrays[path] for path in fills}
        return assemble.assemble(tensors, fills, wanted, place=place, show_progress=False)

    def _path(self, layer: int) -> str:
        return f"{self.layers}.{layer}.{self.module}"

    def _check_targets(
        self, parsed: adapter_config.AdapterConfig, file: str, num_layers: int
    ) -> None:
        paths = [self._path(i) for i in range(num_layers)]
        for target in parsed.targets:
            if not any(adapter_config.ends_path(target, path) for path in paths):
                raise errors.ConfigError(
                    f"{file}: target_modules names {errors.quote(target)}, which is not supported; "
                    f"supported: {self.module.rpartition('.')[2]}"
                )
