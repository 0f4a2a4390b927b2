"""The contract table: everything public that clips or releases, against every contract."""

import hypothesis
import hypothesis.strategies as st
import mechanisms
import pytest
import strategies
from checks import (
    CLIP_CHECKS,
    DOOR_CHECKS,
    check_invariant,
    check_invariant_on,
    check_limit,
    check_unclipped,
)

clips = pytest.mark.parametrize("clip", mechanisms.CLIPS, ids=lambda clip: clip.name)
doors = pytest.mark.parametrize("door", mechanisms.DOORS, ids=lambda door: door.name)


def _name(check):
    return check.__name__.removeprefix("check_")


@clips
@hypothesis.given(
    matrix=strategies.gradients(),
    mask=strategies.masks,
    i=strategies.indices,
    other=st.builds(strategies.row, st.sampled_from(strategies.KINDS), strategies.seeds),
    unit=strategies.clip_norms,
)
@hypothesis.settings(max_examples=60)
def test_invariant(clip, matrix, mask, i, other, unit):
    check_invariant(clip, matrix, mask, i, other, unit)


@clips
def test_invariant_on_fixed_batches(clip):
    check_invariant_on(clip, ["normal", "huge"])


@clips
@pytest.mark.parametrize("check", CLIP_CHECKS, ids=_name)
def test_clipper(clip, check):
    check(clip)


@pytest.mark.parametrize(
    "clip", [clip for clip in mechanisms.CLIPS if clip.limit], ids=lambda clip: clip.name
)
def test_unclipped_limit(clip):
    check_unclipped(clip)


@doors
@pytest.mark.parametrize("check", DOOR_CHECKS, ids=_name)
def test_door(door, check):
    check(door)


@pytest.mark.parametrize(
    "door", [door for door in mechanisms.DOORS if door.unclipped], ids=lambda door: door.name
)
def test_no_noise_no_clip_limit(door):
    check_limit(door)
