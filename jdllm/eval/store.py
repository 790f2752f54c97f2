"""The folder of one run: settings and sessions in `run.json`, one line per answer beside it.

A run can be killed at any moment and started again: finished answers are kept, an incomplete
last line is dropped, and a folder that belongs to other settings is refused. The same holds when
the disk is full: what could not be written whole is taken back.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Collection, Mapping
from typing import Any

from jdllm import errors
from jdllm.host import files

Record = dict[str, Any]


class WriteError(RuntimeError):
    """Says that a file of the run could not be written; what was written before is whole."""


class Store:
    """The answers so far, by example id; `append` writes each to the file at once."""

    def __init__(self, folder: str | pathlib.Path, settings: Mapping[str, Any]):
        self.folder = make_folder(folder)
        self._samples = self.folder / "samples.jsonl"
        self._run = self.folder / "run.json"
        # Converted to JSON and back, so that they compare equal to settings read from a file.
        self._settings = json.loads(json.dumps(settings))
        self.sessions: list[dict[str, float]] = self._read_run()
        self.records: dict[str, Record] = {record["id"]: record for record in self._read_samples()}
        self._write_run()

    def append(self, record: Record) -> None:
        """Adds one answer; one write per line, so only the last line can be incomplete."""
        line = (json.dumps(record, ensure_ascii=False) + "\n").encode()
        try:
            _append(self._samples, line)
        except OSError as error:
            raise _write_error(self._samples, error) from error
        self.records[record["id"]] = record

    def check_asked(self, ids: Collection[str]) -> None:
        """Raises if the folder has answers to questions other than `ids`.

        Results of fewer questions would not describe the answers and the time in the folder.
        """
        foreign = [id_ for id_ in self.records if id_ not in ids]
        if foreign:
            raise errors.ConfigError(
                f"{self.folder} has answers to {len(foreign)} questions that this run does not "
                f"ask, such as {errors.quote(foreign[0])}; raise --limit, or choose another "
                "--output-dir"
            )

    def add_session(self, session: dict[str, float]) -> None:
        """Saves the wall time and tokens of one invocation, so that rates count all of them."""
        self.sessions.append(session)
        self._write_run()

    def write_results(self, results: Mapping[str, Any]) -> None:
        write_json(self.folder / "results.json", results)

    def _read_run(self) -> list[dict[str, float]]:
        if not self._run.exists():
            if self._samples.exists():
                raise errors.ConfigError(
                    f"{self._samples} has no run.json beside it; choose an empty --output-dir"
                )
            return []
        try:
            saved = json.loads(self._run.read_text())
            old, sessions = dict(saved["settings"]), saved["sessions"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise errors.ConfigError(f"{self._run} is damaged: {error}") from error
        if "model_files" in self._settings:  # runs of before do not say
            old.setdefault("model_files", self._settings["model_files"])
        changed = difference(old, self._settings)
        if changed:
            raise errors.ConfigError(
                f"{self.folder} holds a run with other settings: {'; '.join(changed)}; "
                "choose another --output-dir"
            )
        return sessions

    def _read_samples(self) -> list[Record]:
        if not self._samples.exists():
            return []
        content = self._samples.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            with self._samples.open("r+b") as file:
                file.truncate(len(whole))
        records = []
        # Not splitlines, which also splits at U+2028: an answer may hold it, and JSON keeps it.
        for number, line in enumerate(whole.split(b"\n")[:-1], start=1):
            try:
                record = json.loads(line)
                record["id"]
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise errors.ConfigError(f"{self._samples}:{number} is damaged: {error}") from error
            records.append(record)
        return records

    def _write_run(self) -> None:
        write_json(self._run, {"settings": self._settings, "sessions": self.sessions})


def make_folder(path: str | pathlib.Path) -> pathlib.Path:
    """Makes the folder of a run where there is none; one that cannot be used is a ConfigError.

    Commands call it before they load a model, which may take minutes.
    """
    folder = pathlib.Path(path)
    try:
        files.make_writable(folder)
    except OSError as error:
        raise errors.ConfigError(f"cannot use {path} as output folder: {error}") from error
    return folder


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Returns one `name: old -> new` for each setting that differs."""
    names = sorted(old.keys() | new.keys())
    return [
        f"{name}: {old.get(name)!r} -> {new.get(name)!r}"
        for name in names
        if old.get(name) != new.get(name)
    ]


def write_json(path: pathlib.Path, content: Mapping[str, Any]) -> None:
    """Replaces a file by a JSON text, as `write_text` does."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_text(path: pathlib.Path, text: str) -> None:
    """Replaces a file in one step; what was there before stays if that fails."""
    try:
        files.replace_text(path, text)
    except OSError as error:
        raise _write_error(path, error) from error


def _append(path: pathlib.Path, line: bytes) -> None:
    """Appends a line, or nothing if there is no room for all of it."""
    with path.open("ab", buffering=0) as file:
        start, rest = file.tell(), line
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(start)
            raise


def _write_error(path: pathlib.Path, error: OSError) -> WriteError:
    return WriteError(
        f"cannot write {path}: {error.strerror}; answers so far are kept, the same command goes on"
    )
