from klear_core.generate.decoder.batch import PrefixSlots


def test_readers_of_the_same_tokens_share_a_slot() -> None:
    slots = PrefixSlots()
    assert slots.acquire((1, 2)) == slots.acquire((1, 2)) != slots.acquire((1,))
    assert slots.num_slots == 2


def test_a_slot_is_freed_with_its_last_reader_and_used_again() -> None:
    slots = PrefixSlots()
    first = slots.acquire((1, 2))
    assert slots.acquire((1, 2)) == first
    slots.release((1, 2))
    assert (1, 2) in slots
    assert slots.acquire((3,)) != first
    slots.release((1, 2))
    assert (1, 2) not in slots
    assert slots.acquire((4, 5)) == first
    assert slots.num_slots == 2  # as many as were held at once
