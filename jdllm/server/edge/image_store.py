"""Images that wait to be fetched by their URL: bounded in bytes, number and age.

An id is a secret: who knows it may fetch the image (with an API key, where the server asks for
one). The oldest images are dropped first; nothing is written to a disk.
"""

from __future__ import annotations

import collections
import dataclasses
import secrets
import time
from collections.abc import Callable

ID_BYTES = 24
LIFETIME_S = 3600.0  # OpenAI's
MAX_IMAGES = 1000
MAX_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class StoredImage:
    """An encoded image, and when its URL ends, on the clock of the store."""

    content: bytes
    media_type: str
    expires_s: float


class ImageStore:
    """Images by their ids. `now_s` is the clock; only the event loop calls."""

    def __init__(
        self,
        *,
        lifetime_s: float = LIFETIME_S,
        max_images: int = MAX_IMAGES,
        max_bytes: int = MAX_BYTES,
        now_s: Callable[[], float] = time.monotonic,
    ):
        self.lifetime_s = lifetime_s
        self._max_images = max_images
        self._max_bytes = max_bytes
        self._now_s = now_s
        # All live equally long, so the oldest is also the first to expire.
        self._images: collections.OrderedDict[str, StoredImage] = collections.OrderedDict()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """How many bytes the images have together."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._images)

    def put(self, content: bytes, media_type: str) -> str:
        """Keeps an image, which may push older ones out; returns its id."""
        image_id = f"img-{secrets.token_urlsafe(ID_BYTES)}"
        self._images[image_id] = StoredImage(content, media_type, self._now_s() + self.lifetime_s)
        self._num_bytes += len(content)
        self._drop_expired()
        while len(self._images) > self._max_images or (
            self._num_bytes > self._max_bytes and len(self._images) > 1
        ):
            self._drop_oldest()
        return image_id

    def get(self, image_id: str) -> StoredImage | None:
        """Returns an image, None if there is none of that id (any more)."""
        self._drop_expired()
        return self._images.get(image_id)

    def _drop_expired(self) -> None:
        now_s = self._now_s()
        while self._images and next(iter(self._images.values())).expires_s <= now_s:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, dropped = self._images.popitem(last=False)
        self._num_bytes -= len(dropped.content)
