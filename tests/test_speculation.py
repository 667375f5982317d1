"""Properties of the engine over random schedules and faults, in virtual time."""

from __future__ import annotations

import math

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scenarios import Scenario, check

seeds = st.integers(0, 2**32)
depths = st.integers(0, 3)
breadths = st.integers(1, 3)
shares = st.floats(0.0, 1.0)
many = settings(max_examples=700, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@many
@given(
    st.builds(
        Scenario,
        seed=seeds,
        depth=depths,
        breadth=breadths,
        max_turns=st.integers(1, 10),
        max_tokens=st.integers(1, 8),
        max_context=st.integers(5, 300),
        accuracy=shares,
        predictor_faults=st.sampled_from((0.0, 0.3)),
        least=st.sampled_from((None, 0.0, 0.3)),
        spares=st.booleans(),
    )
)
def test_a_rollout_is_the_sequential_one_and_never_later(scenario: Scenario) -> None:
    check(scenario)


@many
@given(
    st.builds(
        Scenario,
        seed=seeds,
        depth=depths,
        breadth=breadths,
        accuracy=shares,
        predictor_faults=st.sampled_from((0.0, 0.3)),
        policy_faults=st.sampled_from((0.0, 0.2, 0.6)),
        tool_fault_after=st.none() | st.integers(0, 5),
        cancel_after=st.none() | st.floats(0.0, 10.0),
    )
)
def test_faults_and_cancellation_at_any_moment(scenario: Scenario) -> None:
    check(scenario)


@many
@given(
    st.builds(
        Scenario,
        seed=seeds,
        depth=depths,
        breadth=breadths,
        accuracy=shares,
        policy_faults=st.sampled_from((0.0, 0.2)),
        cancel_after=st.none() | st.floats(0.0, 30.0),
        seats=st.sampled_from((1, 2, 3, math.inf)),
        rollouts=st.integers(1, 3),
        least=st.sampled_from((None, 0.0)),
        spares=st.booleans(),
        suspensions=st.sampled_from((0.0, 0.5, 5.0)),
    )
)
def test_branches_suspended_at_any_token_resume(scenario: Scenario) -> None:
    check(scenario)
