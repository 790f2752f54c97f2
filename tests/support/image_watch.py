"""What must hold in every round of image rows on the device of `image_fake.py`."""

import collections

from support.image_fake import INVALID_OUTPUT_SEED, INVALID_SEED, alone

from jdllm.scheduler.rows.image import buckets


def check_memory(core):
    """Slots and entries are held by running requests, each as often as they say."""
    made, captions = core.scheduler, core.scheduler.rows.captions
    slots = [one.held.slot for one in made.running] + made.live.free_slots
    assert sorted(slots) == list(range(made.live.max_running))
    assert all(one.stay is None for one in made.waiting)
    held = collections.Counter(entry for one in made.running for entry in one.held.entries)
    found = {number: entry.num_holders for number, entry in captions._entries.items()}
    assert held == {number: count for number, count in found.items() if count}
    assert sorted([*captions._entries, *captions._free]) == list(range(captions.num_entries))
    for one in made.running:
        wanted = [tuple(one.prompt_ids)]
        if one.image.is_guided:
            wanted.append(one.image.negative_ids)
        assert [captions.caption(entry) for entry in one.held.entries] == wanted


class Watch:
    """Follows the launches, as the device sees them, and says what each row could have done."""

    def __init__(self, core, device):
        self.core, self.device, self.seen = core, device, 0
        self.written, self.steps, self.decoded, self.begun = {}, {}, {}, set()
        self.modulated = {}  # the step after the window of each stay
        self.ready_since, self.num_steps = {}, 0  # since its last step, or later
        self.others = 0  # launches since the last step

    def is_ready(self, one):
        stay, image = one.held, one.image
        steps = self.steps.get(stay, 0)
        return (
            all(self.written.get(entry) == self.caption(entry) for entry in stay.entries)
            and (image.latents is None or stay in self.begun)
            and steps < image.num_inference_steps
            and (self.device.windows is None or steps < self.modulated.get(stay, 0))
            and steps not in set(image.preview_steps) - self.decoded.get(stay, set())
        )

    def caption(self, entry):
        return self.core.scheduler.rows.captions.caption(entry)

    def before(self):
        """Call before a step of the core: which rows could be stepped now."""
        for entry in self.core.scheduler.rows.captions._free:
            self.written.pop(entry, None)
        self.core.scheduler._admit()
        self.ready = [one for one in self.core.scheduler.running if self.is_ready(one)]
        for one in self.core.scheduler.running:
            if one not in self.ready and one.held in self.ready_since:
                self.ready_since[one.held] = self.num_steps

    def after(self):
        """Checks and notes the launch, if there was one."""
        batches = self.device.trace[self.seen :]
        assert len(batches) <= 1
        if not batches:
            assert not self.ready, "nothing was launched, although a row was ready"
            return
        self.seen, (batch,) = len(self.device.trace), batches
        match batch.bucket:
            case buckets.StepBucket():
                self.others = 0
                self.num_steps += 1
                self.note_steps(batch)
                return
            case buckets.EncodeBucket():
                self.written |= {row.entry: row.ids for row in batch.rows}
            case buckets.BeginBucket():
                self.begun |= {row.stay for row in batch.rows}
            case buckets.ModulateBucket():
                for row in batch.rows:
                    assert row.step == self.steps.get(row.stay, 0), "a window begins elsewhere"
                    self.modulated[row.stay] = row.step + self.device.windows.steps
            case buckets.DecodeBucket():
                for row in batch.rows:
                    self.decoded.setdefault(row.stay, set()).add(row.step)
        assert not (self.ready and self.others), "two launches between steps hold up a ready row"
        self.others += 1

    def note_steps(self, batch):
        assert {row.request for row in batch.rows} <= set(self.ready)
        for row in batch.rows:
            assert row.step == self.steps.get(row.stay, 0), "a step was left out"
            self.steps[row.stay] = row.step + 1
            if row.stay in self.ready_since:
                waited = self.num_steps - self.ready_since[row.stay]
                assert waited <= self.core.scheduler.live.max_running, "a row starves"
            self.ready_since[row.stay] = self.num_steps


def check_products(asks, client, gone):
    """Requests that were not ended from outside have all that they have alone, the others part."""
    for one in asks:
        frames, product = alone(one)
        name = one.request_id
        found = client.frames.get(name, {})
        assert found.items() <= frames.items()
        if one.seed == INVALID_OUTPUT_SEED:
            assert not found
        if one.seed == INVALID_OUTPUT_SEED or (
            one.seed == INVALID_SEED and one.image.num_inference_steps > 1
        ):
            assert name not in client.products
            assert name in gone or "NaN" in client.errors[name]
        elif name not in gone:
            assert client.products[name] == product and found == frames
            assert one.nfe >= one.image.num_inference_steps
            if not one.num_preemptions:
                assert one.nfe == one.image.num_inference_steps
