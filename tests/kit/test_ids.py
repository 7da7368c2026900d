"""Ids sort by the time they were made."""

from services.kit.ids import new_id


def test_ids_of_one_process_are_unique_and_in_order() -> None:
    made = [new_id("job") for _ in range(10_000)]
    assert made == sorted(set(made))
    assert {len(name) for name in made} == {len("job_") + 26}
