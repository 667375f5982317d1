"""What a run did, with every denominator. Pure functions over its trajectories."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from obsspec.reports.records import TrajectoryLine, TurnLine


@dataclass(frozen=True, slots=True)
class PredictorSummary:
    """What one predictor contributed."""

    drafted: int
    """Tool calls for which a draft of its own came before the observation. Of equal drafts the surest is recorded."""
    drafts: int
    """Those drafts."""
    exact: int
    draft_seconds: float
    """From the question to a draft, on average."""
    hits: int
    """Tool calls whose kept branch stood on this predictor's draft."""
    share_of_hits: float
    """Of all predictors' hits, 0 to 1; 0 where there are none."""
    hidden_seconds: float
    """Hidden under the tools of those calls."""
    share_of_hidden: float
    """Of all hidden seconds, likewise."""


@dataclass(frozen=True, slots=True)
class Summary:
    """One run in figures. Seconds are sums over its rollouts."""

    rollouts: int
    tasks: int
    solved: int
    """Rollouts with reward 1 (or more)."""
    tool_calls: int
    """Turns that executed something."""
    attempted: int
    """Tool calls whose observation a predictor was asked for."""
    drafted: int
    """Tool calls for which a usable draft came before the observation."""
    hits: int
    agent_seconds: float
    tool_seconds: float
    generation_seconds: float
    """The policy's work on generations that were kept."""
    waiting_seconds: float
    """Agent latency in which neither a generation that was kept nor a tool ran: waiting for a seat, or for the other
    rollouts of this process."""
    hidden_seconds: float
    kept_tokens: int
    wasted_tokens: int
    outcomes: dict[str, int]
    predictors: dict[str, PredictorSummary]
    solved_by_family: dict[str, tuple[int, int]]
    """Solved and all rollouts."""


def summarize(trajectories: Iterable[TrajectoryLine]) -> Summary:
    lines = list(trajectories)
    turns = [turn for line in lines for turn in line.turns]
    calls = [turn for turn in turns if turn.executing is not None]
    outcomes: dict[str, int] = defaultdict(int)
    for turn in calls:
        outcomes[turn.outcome] += 1
    families: dict[str, tuple[int, int]] = {}
    for line in lines:
        solved, rollouts = families.get(line.family, (0, 0))
        families[line.family] = (solved + _solved(line), rollouts + 1)
    return Summary(
        rollouts=len(lines),
        tasks=len({line.task for line in lines}),
        solved=sum(map(_solved, lines)),
        tool_calls=len(calls),
        attempted=sum(turn.outcome != "off" for turn in calls),
        drafted=sum(turn.outcome in ("hit", "miss", "gated") for turn in calls),
        hits=outcomes["hit"],
        agent_seconds=sum(line.seconds for line in lines),
        tool_seconds=sum(turn.tool_seconds for turn in calls),
        generation_seconds=sum(end - start for turn in turns for start, end in turn.generating),
        waiting_seconds=sum(map(_waiting, lines)),
        hidden_seconds=sum(turn.hidden_seconds for turn in calls),
        kept_tokens=sum(turn.tokens for turn in turns),
        wasted_tokens=sum(turn.wasted_tokens for turn in turns),
        outcomes={name: count for name, count in outcomes.items() if count},
        predictors=_by_predictor(calls),
        solved_by_family=dict(sorted(families.items())),
    )


def _waiting(line: TrajectoryLine) -> float:
    """Seconds of a rollout in which nothing of it ran that was kept."""
    spans = sorted(span for turn in line.turns for span in (*turn.generating, turn.executing) if span)
    waited = reached = 0.0
    for start, end in spans:
        waited += max(0.0, start - reached)
        reached = max(reached, end)
    return waited + max(0.0, line.seconds - reached)


def _solved(line: TrajectoryLine) -> bool:
    return (line.reward or 0.0) >= 1.0


def _by_predictor(calls: list[TurnLine]) -> dict[str, PredictorSummary]:
    hits = [(_kept_predictor(turn), turn.hidden_seconds) for turn in calls if turn.outcome == "hit"]
    hidden = sum(seconds for _, seconds in hits)
    summaries = {}
    for name in sorted({draft.predictor for turn in calls for draft in turn.drafts}):
        by_call = [[draft for draft in turn.drafts if draft.predictor == name] for turn in calls]
        own = [draft for drafts in by_call for draft in drafts]
        kept = [seconds for predictor, seconds in hits if predictor == name]
        summaries[name] = PredictorSummary(
            drafted=sum(map(bool, by_call)),
            drafts=len(own),
            exact=sum(draft.exact for draft in own),
            draft_seconds=sum(draft.seconds for draft in own) / len(own),
            hits=len(kept),
            share_of_hits=len(kept) / len(hits) if hits else 0.0,
            hidden_seconds=sum(kept),
            share_of_hidden=sum(kept) / hidden if hidden else 0.0,
        )
    return summaries


def _kept_predictor(turn: TurnLine) -> str:
    return next(draft.predictor for draft in turn.drafts if draft.exact and draft.admitted)
