"""Images that wait for their URL: bounded in number, bytes and age, and never mixed up."""

from __future__ import annotations

from jdllm.server.edge import image_store


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_an_image_comes_back_as_it_was():
    images = image_store.ImageStore()
    ids = [images.put(bytes([i]), f"image/{i}") for i in range(5)]
    assert len(set(ids)) == 5
    for i, image_id in enumerate(ids):
        found = images.get(image_id)
        assert (found.content, found.media_type) == (bytes([i]), f"image/{i}")
    assert images.get(ids[0][:-1]) is None and images.get("") is None


def test_the_oldest_go_when_there_are_too_many():
    images = image_store.ImageStore(max_images=3)
    ids = [images.put(b"x", "image/png") for _ in range(5)]
    assert [images.get(one) is not None for one in ids] == [False, False, True, True, True]
    assert images.num_bytes == 3


def test_the_oldest_go_when_they_are_too_large():
    images = image_store.ImageStore(max_bytes=10)
    ids = [images.put(b"1234", "image/png") for _ in range(4)]
    assert [images.get(one) is not None for one in ids] == [False, False, True, True]
    assert images.num_bytes == 8
    large = images.put(b"x" * 50, "image/png")  # its URL has just been given away
    assert images.get(large) is not None and len(images) == 1
    images.put(b"1", "image/png")
    assert images.get(large) is None and images.num_bytes == 1


def test_an_image_ends_with_its_time():
    clock = Clock()
    images = image_store.ImageStore(lifetime_s=60, now_s=clock)
    first = images.put(b"a", "image/png")
    clock.now_s += 59
    second = images.put(b"b", "image/png")
    assert images.get(first) is not None
    clock.now_s += 1
    assert images.get(first) is None and images.get(second) is not None
    assert (len(images), images.num_bytes) == (1, 1)


def test_ids_cannot_be_guessed():
    images = image_store.ImageStore()
    ids = [images.put(b"", "image/png") for _ in range(200)]
    assert all(len(one) >= 4 + 32 for one in ids)  # 32 characters of base64 are 192 bits
    # Every place of an id takes many values.
    assert all(len({one[place] for one in ids}) > 20 for place in range(4, 36))
