"""The simulated engine's scheduler: slots, blocks, steps and faults, on a clock made of numbers."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.agent.engines.asks import Story, ask, chat
from trio_gateway.agent.engines._simulated_core import CATCH_UP, SimulatedCore
from trio_gateway.agent.engines._simulated_faults import Fault, FaultPlan, PlannedFault
from trio_gateway.agent.engines._simulated_generation import (
    HOLDING,
    TRANSITIONS,
    Generation,
    Limits,
    Refusal,
    Speed,
    State,
)
from trio_gateway.agent.engines._simulated_request import AskError

SMALL = Limits(slots=3, step_tokens=16, block_tokens=4, blocks=12, context=40)
FAULTS = [
    Fault("hang", after=2),
    Fault("slow", factor=2.5),
    Fault("die"),
    Fault("die", after=3),
    Fault("out_of_memory", after="content"),
    Fault("malformed", after=1),
    Fault("lost_cancel"),
    Fault("late_release", seconds=0.7),
]


def story(limits: Limits = SMALL, speed: Speed | None = None, seed: int = 0) -> Story:
    return Story(SimulatedCore(limits, speed, seed=seed), seed)


# Conservation ----------------------------------------------------------------------------------------------


class Account(RuleBasedStateMachine):
    """Whatever happens in whatever order: slots, blocks and requests are neither lost nor made."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = SMALL
        self.story = story(speed=Speed(jitter=0.2))
        self.core = self.story.core
        self.submitted = 0
        self.known: list[Generation] = []
        self.told: Counter[Generation] = Counter()

    @rule(
        prompt=st.integers(1, 39),
        tokens=st.integers(1, 40),
        kind=st.integers(0, 2),
        n=st.integers(1, 3),
        faults=st.lists(st.sampled_from(FAULTS), max_size=2),
    )
    def somebody_asks(self, prompt: int, tokens: int, kind: int, n: int, faults: list[Fault]) -> None:
        self.submitted += 1
        self.known.append(self.story.submit(ask(prompt, tokens, *faults, kind=kind, n=n)))

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def somebody_leaves(self, data: st.DataObject) -> None:
        self.story.cancel(data.draw(st.sampled_from(self.known)))

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def somebody_pauses(self, data: st.DataObject) -> None:
        self.core.pause(data.draw(st.sampled_from(self.known)))

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def somebody_goes_on(self, data: st.DataObject) -> None:
        self.story.resume(data.draw(st.sampled_from(self.known)))

    @rule(times=st.integers(1, 20))
    def time_passes(self, times: int) -> None:
        for _ in range(times):
            self.story.step()

    @rule(late=st.floats(0, 2 * CATCH_UP))
    def the_driver_is_late(self, late: float) -> None:
        self.story.now += late
        self.story.advance()

    @invariant()
    def slots_are_neither_lost_nor_made(self) -> None:
        running = [s for g in self.core.generations for s in g.sequences if s.state in HOLDING]
        assert self.core.running == len(running) <= self.limits.slots
        assert self.core.running <= self.core.high_water <= self.limits.slots
        assert self.core.waiting == sum(
            s.state is State.WAITING for g in self.core.generations for s in g.sequences
        )

    @invariant()
    def blocks_are_neither_lost_nor_made(self) -> None:
        memory = self.core.memory
        tables = [s.table for g in self.core.generations for s in g.sequences if s.table is not None]
        used = {block for table in tables for block in table.blocks}
        assert memory.held == len(used)
        assert memory.free + memory.held + memory.kept == memory.total
        assert all(
            s.table is not None for g in self.core.generations for s in g.sequences if s.state in HOLDING
        )

    @invariant()
    def requests_are_neither_lost_nor_made(self) -> None:
        core = self.core
        assert core.arrived == self.submitted == len(core.generations) + sum(core.outcomes.values())
        assert core.generated_tokens == sum(generation.generated for generation in self.known)
        for generation in self.known:
            assert (generation.released is None) == (generation in core.generations)
            assert generation.left == sum(s.state is not State.OVER for s in generation.sequences)

    @invariant()
    def nothing_is_told_of_what_has_ended(self) -> None:
        for output in self.story.outputs:
            assert output.generation in self.known
            self.told[output.generation] += output.piece is not None
        self.story.outputs.clear()
        assert all(self.told[generation] == generation.generated for generation in self.known)

    def teardown(self) -> None:
        """Everybody leaves or ends; then the engine is as empty as at its start."""
        for generation in self.known:
            self.core.resume(generation)
            self.story.cancel(generation)
        self.story.play()
        stuck = [g for g in self.core.generations if g.stuck and not g.heeds_cancel]
        assert list(self.core.generations) == stuck or any(stuck)
        if not stuck:
            assert (self.core.running, self.core.waiting, self.core.memory.held) == (0, 0, 0)
        for entry in self.core.entries:
            moments = (entry.arrived, entry.admitted, entry.first_token, entry.ended, entry.released)
            known = [moment for moment in moments if moment is not None]
            assert known == sorted(known)


TestAccount = Account.TestCase
TestAccount.settings = settings(max_examples=50)


@given(
    seed=st.integers(0, 2**64), asks=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), max_size=6)
)
def test_the_same_seed_and_requests_give_the_same_run(seed: int, asks: list[tuple[int, int]]) -> None:
    def run() -> tuple[list[Any], list[Any], float]:
        one = story(speed=Speed(jitter=0.5), seed=seed)
        for prompt, tokens in asks:
            one.submit(ask(prompt, tokens))
        one.play()
        told = [(o.generation.number, o.choice, o.piece) for o in one.outputs]
        return told, list(one.core.steps), one.now

    assert run() == run()


@given(tokens=st.lists(st.integers(1, 20), min_size=1, max_size=8))
def test_everybody_gets_what_he_asked_for_however_small_the_memory(tokens: list[int]) -> None:
    one = story(Limits(slots=4, step_tokens=8, block_tokens=2, blocks=12, context=24))
    asked = [one.submit(ask(3, count, kind=at)) for at, count in enumerate(tokens)]
    one.play()
    assert [generation.generated for generation in asked] == tokens
    assert [generation.outcome for generation in asked] == ["finished"] * len(tokens)
    assert one.core.memory.held == 0


def test_no_sequence_can_move_when_it_is_over() -> None:
    assert all(state is not State.OVER for state, _ in TRANSITIONS)
    assert {state for state, _ in TRANSITIONS} | set(TRANSITIONS.values()) == set(State)


# Slots, steps and time -------------------------------------------------------------------------------------


def test_who_finds_no_slot_waits_and_is_served_in_the_order_of_arrival() -> None:
    one = story()
    asked = [one.submit(ask(2, 3, kind=at)) for at in range(7)]
    one.step()
    assert (one.core.running, one.core.waiting) == (3, 4)
    one.play()
    ends = [generation.ended for generation in asked]
    assert ends == sorted(ends, key=lambda end: end or 0.0)
    assert one.core.high_water == 3
    assert max(step.running for step in one.core.steps) == 3


def test_a_step_takes_the_time_of_its_prompts_and_its_tokens() -> None:
    one = story(speed=Speed(prefill=100, decode=10, crowding=0.5))
    one.submit(ask(4, 3))
    one.submit(ask(16, 3, kind=1))
    one.play()
    assert [round(step.ends - step.begins, 9) for step in one.core.steps] == [
        0.04,  # four tokens of the first prompt, at whose end comes its first token
        0.26,  # sixteen of the second, and a token
        0.15,  # two tokens, which crowd each other
        0.1,
    ]
    assert [(step.prefilled, step.decoded) for step in one.core.steps] == [(4, 0), (16, 1), (0, 2), (0, 1)]


def test_a_long_prompt_is_computed_in_pieces_between_the_tokens_of_others() -> None:
    one = story(speed=Speed(prefill=100))
    first = one.submit(ask(2, 30))
    one.step()
    long = one.submit(ask(36, 1, kind=1))
    one.play()
    assert [step.prefilled for step in one.core.steps if step.prefilled] == [2, 16, 16, 4]
    assert long.first_token is not None
    assert first.ended is not None
    assert long.first_token < first.ended


def test_jitter_changes_the_length_of_steps_within_its_share() -> None:
    one = story(speed=Speed(decode=10, jitter=0.5))
    one.submit(ask(1, 30))
    one.play()
    lengths = [step.ends - step.begins for step in one.core.steps if not step.prefilled]
    assert len(set(lengths)) > 5
    assert all(0.05 <= length <= 0.15 for length in lengths)


def test_a_driver_that_is_a_little_late_does_not_slow_the_engine() -> None:
    one = story(speed=Speed(decode=10))
    one.submit(ask(1, 5))
    while one.step():
        one.now += CATCH_UP / 2
        one.advance()
    assert sum(step.ends - step.begins for step in one.core.steps) == pytest.approx(
        one.core.steps[-1].ends - one.core.steps[0].begins
    )


def test_a_driver_that_is_very_late_does_slow_the_engine() -> None:
    one = story(speed=Speed(decode=10))
    one.submit(ask(1, 2))
    one.now += 10
    one.advance()
    assert one.core.steps[-1].begins == one.now


def test_a_step_does_not_end_before_its_time() -> None:
    one = story()
    one.submit(ask(1, 2))
    one.advance()
    assert one.outputs == []


def test_the_rate_is_that_of_the_last_seconds() -> None:
    one = story(speed=Speed(decode=10, prefill=1e6))
    one.submit(ask(1, 39))
    assert one.core.tokens_per_second(one.now) == 0
    one.play()
    assert one.core.tokens_per_second(one.now) == pytest.approx(10, rel=0.06)
    assert one.core.tokens_per_second(one.now + 3) == 0


def test_speed_can_be_multiplied() -> None:
    speed = Speed(prefill=10, decode=2, load=8).times(4)
    assert (speed.prefill, speed.decode, speed.load) == (40, 8, 2)
    assert speed.step(40, 1) == pytest.approx(1.125)


@pytest.mark.parametrize(
    "wrong",
    [{"slots": 0}, {"step_tokens": 0}, {"block_tokens": 0}, {"blocks": 0}, {"context": 1}, {"blocks": 1}],
)
def test_an_engine_of_no_size_can_not_be_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="at least"):
        Limits(**wrong)


@pytest.mark.parametrize(
    "wrong", [{"prefill": 0}, {"decode": -1}, {"crowding": -0.1}, {"load": -1}, {"jitter": 1}]
)
def test_an_engine_without_speed_can_not_be_made(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"positive|below"):
        Speed(**wrong)


# Choices ---------------------------------------------------------------------------------------------------


def test_each_choice_holds_a_slot_and_says_something_else() -> None:
    one = story()
    two = one.submit(ask(2, 6, n=2))
    assert one.core.running == 2
    assert two.running == 2
    one.play()
    assert one.text(two, 0) != one.text(two, 1)
    assert (two.generated, two.prompt_tokens, two.outcome) == (12, 2, "finished")


def test_choices_that_start_together_wait_for_all_their_slots() -> None:
    one = story(Limits(slots=3, together=True))
    one.submit(ask(2, 4, n=2))
    pair = one.submit(ask(2, 4, n=2))
    single = one.submit(ask(2, 4))
    assert (pair.running, single.running) == (0, 0)
    one.play()
    assert [pair.outcome, single.outcome] == ["finished", "finished"]
    with pytest.raises(AskError, match="4 choices"):
        one.submit(ask(2, 4, n=4))


# Memory ----------------------------------------------------------------------------------------------------


def test_a_prompt_that_begins_like_an_earlier_one_is_found_in_memory() -> None:
    one = story(speed=Speed(prefill=100))
    first = one.submit(ask(13, 1))
    one.play()
    second = one.submit(ask(15, 1))
    one.play()
    assert (first.cached_tokens, second.cached_tokens) == (0, 12)
    assert [step.prefilled for step in one.core.steps] == [13, 3]


def test_prompts_of_another_salt_share_nothing() -> None:
    one = story()
    one.submit(ask(13, 1, salt=1))
    one.play()
    other = one.submit(ask(13, 1, salt=2))
    one.play()
    assert other.cached_tokens == 0


def test_at_least_one_token_of_a_prompt_is_computed() -> None:
    one = story()
    for _ in range(2):
        again = one.submit(ask(8, 1))
        one.play()
    assert again.cached_tokens == 4


def test_a_request_that_finds_no_blocks_waits_for_them() -> None:
    one = story()
    one.submit(ask(39, 1))
    waits = one.submit(ask(20, 2, kind=1))
    assert (one.core.running, one.core.waiting) == (1, 1)
    one.play()
    assert waits.outcome == "finished"
    assert one.core.preemptions == 0


def test_the_youngest_gives_its_blocks_back_and_says_the_same_later() -> None:
    def run(blocks: int) -> tuple[list[str], int]:
        one = story(Limits(slots=3, step_tokens=64, block_tokens=4, blocks=blocks, context=40))
        asked = [one.submit(ask(8, 25, kind=at)) for at in range(3)]
        one.play()
        assert one.core.memory.held == 0
        return [one.text(generation) for generation in asked], one.core.preemptions

    texts, preempted = run(blocks=12)
    assert preempted > 0
    assert (texts, 0) == run(blocks=100)


def test_a_prompt_that_is_too_long_is_refused_by_the_numbers() -> None:
    one = story()
    with pytest.raises(AskError, match="maximum context length is 40 tokens") as refused:
        one.submit(ask(40, 1))
    assert (refused.value.param, refused.value.status) == ("prompt", 400)
    with pytest.raises(AskError) as refused:
        one.submit(chat("word " * 40))
    assert refused.value.param == "messages"
    assert (one.core.arrived, one.core.refused, one.core.generations) == (2, 2, ())


def test_the_context_ends_an_answer() -> None:
    one = story()
    cut = one.submit(ask(30, 1000))
    one.play()
    assert cut.generated == 10
    assert one.core.tally == {"length": 1}


# Pausing and leaving ---------------------------------------------------------------------------------------


def test_who_is_paused_keeps_slot_and_memory_and_gets_nothing() -> None:
    one = story()
    paused = one.submit(ask(8, 20))
    for _ in range(4):
        one.step()
    one.core.pause(paused)
    one.play()
    had = paused.generated
    assert 0 < had < 20
    assert (one.core.running, one.core.memory.held > 0, one.core.wake_at) == (1, True, None)
    one.resume(paused)
    one.play()
    assert (paused.generated, paused.outcome) == (20, "finished")


def test_who_is_paused_is_not_made_to_give_his_blocks_to_others() -> None:
    one = story()
    other = one.submit(ask(4, 36))
    paused = one.submit(ask(30, 9, kind=1))
    while not paused.generated:
        one.step()
    one.core.pause(paused)
    one.play()
    assert (other.generated, other.running, paused.running) == (12, 0, 1)
    one.resume(paused)
    one.play()
    assert [other.outcome, paused.outcome] == ["finished", "finished"]
    assert other.generated == 36


def test_who_is_paused_before_his_prompt_is_computed_waits_with_it() -> None:
    one = story()
    paused = one.submit(ask(30, 1))
    one.core.pause(paused)
    one.play()
    assert (paused.generated, paused.sequences[0].to_prefill) == (0, 14)
    one.resume(paused)
    one.play()
    assert paused.outcome == "finished"


def test_a_cancel_keeps_the_slot_until_the_step_is_over() -> None:
    one = story()
    left = one.submit(ask(2, 30))
    one.step()
    one.cancel(left)
    assert (left.ended, left.released, one.core.running) == (one.now, None, 1)
    one.step()
    assert (left.outcome, left.released, one.core.running) == ("cancelled", one.now, 0)
    assert one.tokens(left) == left.generated == 1


def test_a_cancel_takes_effect_at_once_where_no_step_is_under_way() -> None:
    one = story()
    left = one.submit(ask(2, 30))
    one.core.pause(left)
    one.play()
    one.cancel(left)
    assert left.released == one.now


def test_who_waits_leaves_at_once() -> None:
    one = story()
    for at in range(3):
        one.submit(ask(2, 3, kind=at))
    waits = one.submit(ask(2, 3))
    one.step()
    one.cancel(waits)
    assert (waits.released, waits.admitted, one.core.waiting) == (one.now, None, 0)


def test_a_second_cancel_and_one_after_the_end_have_no_effect() -> None:
    one = story()
    left, done = one.submit(ask(2, 30)), one.submit(ask(2, 1))
    one.cancel(left)
    one.cancel(left)
    one.play()
    one.cancel(done)
    one.core.pause(left)
    assert one.core.outcomes == {"cancelled": 1, "finished": 1}
    assert not left.paused


# Faults ----------------------------------------------------------------------------------------------------


def test_a_lost_cancel_lets_it_go_on_to_its_end() -> None:
    one = story()
    lost = one.submit(ask(2, 10, Fault("lost_cancel")))
    one.core.pause(lost)
    one.cancel(lost)
    assert lost.ended is None
    one.play()
    assert (lost.generated, lost.outcome, one.core.running) == (10, "cancelled", 0)


def test_a_late_release_keeps_the_slot_for_its_time() -> None:
    one = story(Limits())
    late = one.submit(ask(2, 30, Fault("late_release", seconds=3)))
    others = [one.submit(ask(2, 2, kind=at)) for at in range(1, 5)]
    one.submit(ask(2, 500, kind=9))  # its steps go on all the time
    one.step()
    left_at = one.now
    one.cancel(late)
    one.play()
    assert late.released is not None
    assert left_at + 3 <= late.released < left_at + 3.1
    assert late.ended == left_at
    assert all(other.released is not None and other.released < late.released for other in others)


def test_a_hanging_request_holds_its_slot_and_says_nothing_more() -> None:
    one = story()
    hung = one.submit(ask(2, 10, Fault("hang", after=3), n=2))
    one.play()
    assert (hung.generated, hung.outcome, one.core.running) == (3, None, 2)
    one.cancel(hung)
    assert hung.outcome == "cancelled"
    assert one.core.running == 0


def test_a_slow_request_gets_a_token_in_every_so_manieth_step() -> None:
    one = story(speed=Speed(prefill=1e9, decode=10))
    slow = one.submit(ask(1, 4, Fault("slow", factor=3)))
    one.play()
    assert slow.generated == 4
    assert one.now == pytest.approx(1.1)


@pytest.mark.parametrize("kind", ["die", "out_of_memory"])
@pytest.mark.parametrize(("after", "tokens"), [("headers", 0), ("content", 0), (3, 3)])
def test_a_request_dies_when_it_has_had_so_many_tokens(kind: Any, after: Any, tokens: int) -> None:
    one = story(Limits(slots=2))
    dies = one.submit(ask(2, 10, Fault(kind, after=after), n=3))
    one.play()
    (told,) = [output.fault for output in one.outputs if output.fault]
    assert told.kind == kind
    assert (dies.generated, dies.outcome, one.core.running, one.core.waiting) == (tokens, "failed", 0, 0)
    assert dies.silent_at_first == (after == "headers")


def test_a_request_can_die_when_one_of_its_choices_has_ended() -> None:
    one = story(Limits())
    whole = one.submit(ask(2, None, n=2))
    one.play()
    lengths = sorted(sequence.generated for sequence in whole.sequences)
    assert lengths[0] < lengths[1]
    dies = one.submit(ask(2, None, Fault("die", after=2 * lengths[0] + 1), n=2))
    one.play()
    assert (dies.generated, dies.outcome, one.core.tally["stop"]) == (2 * lengths[0] + 1, "failed", 3)


def test_a_malformed_line_comes_between_tokens_and_ends_nothing() -> None:
    one = story()
    odd = one.submit(ask(2, 4, Fault("malformed", after=2)))
    one.play()
    assert [output.fault is not None for output in one.outputs] == [False, False, True, False, False]
    assert odd.outcome == "finished"


def test_a_fault_that_its_request_does_not_live_to_see_does_not_strike() -> None:
    one = story()
    done = one.submit(ask(2, 4, Fault("die", after=4)))
    one.play()
    assert done.outcome == "finished"


def test_an_engine_refuses_what_it_is_told_to() -> None:
    one = story()
    with pytest.raises(Refusal, match="capacity"):
        one.submit(ask(2, 4, Fault("refuse")))
    with pytest.raises(Refusal, match="model_load_failed"):
        one.submit(ask(2, 4, Fault("load_failure")))
    assert (one.core.refused, one.core.running, one.core.generations) == (2, 0, ())


def test_an_engine_with_a_bounded_queue_refuses_what_is_over_it() -> None:
    one = story(Limits(slots=1, max_queued=1))
    one.submit(ask(2, 4))
    one.submit(ask(2, 4))
    with pytest.raises(Refusal, match="capacity"):
        one.submit(ask(2, 4))
    one.play()
    one.submit(ask(2, 4))


def test_an_engine_takes_nothing_before_its_model_is_loaded() -> None:
    one = story(speed=Speed(load=5))
    with pytest.raises(Refusal, match="engine_unready"):
        one.submit(ask(2, 4))
    one.now = 5.0
    one.submit(ask(2, 4))


def test_a_plan_gives_faults_to_those_that_name_none() -> None:
    one = story()
    one.core.plan = FaultPlan([PlannedFault(Fault("hang", after=1), request=2)])
    first, second = one.submit(ask(2, 4)), one.submit(ask(2, 4))
    one.play()
    assert (first.generated, second.generated) == (4, 1)


def test_the_dice_of_a_plan_are_those_of_the_caller() -> None:
    def refused(seed: int) -> list[int]:
        core = SimulatedCore(SMALL)
        core.plan = FaultPlan([PlannedFault(Fault("refuse"), probability=0.5)])
        rng, found = Random(seed), []
        for number in range(40):
            try:
                core.submit(ask(2, 1), 0.0, rng)
            except Refusal:
                found.append(number)
        return found

    assert refused(1) == refused(1) != refused(2)
    assert 5 < len(refused(1)) < 35
