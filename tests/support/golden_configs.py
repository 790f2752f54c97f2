"""Models with the config of a golden but for a few keys, and without weights."""

import json
import pathlib

GOLDENS = pathlib.Path(__file__).parents[1] / "data" / "goldens"


def variant(folder, family, **changes):
    """Returns a folder with only the changed config.json of a golden."""
    folder.mkdir(exist_ok=True)
    config = json.loads((GOLDENS / family / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder
