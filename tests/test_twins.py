"""Every broken twin must be caught: that is what shows that the contract checks have teeth."""

import checks
import pytest
import twins

import jdp


@pytest.mark.parametrize("name", twins.TWINS)
def test_twin_is_caught(name):
    check, twin = twins.TWINS[name]
    with pytest.raises(AssertionError):
        check(twin)


@pytest.mark.parametrize(
    "check", (*checks.DOOR_CHECKS, checks.check_limit), ids=lambda check: check.__name__
)
def test_the_frame_of_the_twins_is_sound(check):
    # So that a twin is caught for what is broken in it, and not for the frame around it.
    check(twins.SOUND)


@pytest.mark.parametrize("check", checks.CLIP_CHECKS, ids=lambda check: check.__name__)
def test_the_frame_of_the_clipping_twins_is_sound(check):
    check(checks.Clip("", twins.wrapped(jdp.ClippedSum)))
