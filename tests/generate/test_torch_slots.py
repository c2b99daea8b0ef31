from klear_core.generate.qwen3.slots import PrefixSlots


def test_readers_of_the_same_tokens_share_a_slot() -> None:
    slots = PrefixSlots()
    assert slots.take((1, 2)) == slots.take((1, 2)) != slots.take((1,))
    assert slots.num_slots == 2


def test_a_slot_is_freed_with_its_last_reader_and_used_again() -> None:
    slots = PrefixSlots()
    first = slots.take((1, 2))
    assert slots.take((1, 2)) == first
    slots.release((1, 2))
    assert (1, 2) in slots
    assert slots.take((3,)) != first
    slots.release((1, 2))
    assert (1, 2) not in slots
    assert slots.take((4, 5)) == first
    assert slots.num_slots == 2  # as many as were held at once
