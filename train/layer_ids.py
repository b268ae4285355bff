"""Which target layers a drafter conditions on when nobody says."""

from __future__ import annotations

from .errors import TrainError


def default_layer_ids(num_layers: int, count: int) -> tuple[int, ...]:
    """``count`` context layers of a target of ``num_layers``: z-lab's ``build_target_layer_ids``.

    Id k is the output of the target's 0-based layer k. One id is the middle layer; more are spread evenly from 1 to
    ``num_layers - 3``, rounded as Python rounds (half to even). Raises TrainError where no such ids exist.
    """
    if count < 1 or count > num_layers - 3:
        raise TrainError(
            f"context layers: found {count} of a target of {num_layers} layers, want 1..{max(num_layers - 3, 0)}; "
            "choose fewer."
        )
    if count == 1:
        return (num_layers // 2,)
    ids = tuple(round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count))
    assert len(set(ids)) == count
    return ids
