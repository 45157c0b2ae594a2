"""The simulated engine's blocks, and the prompts in them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trio_gateway.agent.engines._simulated_memory import BlockTable, KVMemory, chain

TOTAL = 8


class Blocks(RuleBasedStateMachine):
    """Sequences come, grow and go; a list of who holds what keeps the account."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = KVMemory(TOTAL, 2)
        self.held: list[BlockTable] = []

    @rule(kind=st.integers(0, 2), tokens=st.integers(1, 14), more=st.integers(0, 3))
    def comes(self, kind: int, tokens: int, more: int) -> None:
        names = chain([kind] * tokens, 2, 0)
        before = self.memory.available
        table = self.memory.take(names, tokens + more)
        if table is None:
            assert self.memory.available == before
            assert self.memory.blocks_for(tokens + more) > before - sum(
                block in self.memory._kept for block in self.memory._by_name.values()
            )
            return
        assert len(table) == self.memory.blocks_for(tokens + more)
        assert table.cached <= len(names)
        self.memory.remember(table, names)
        self.held.append(table)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def grows(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.held))
        size, room = len(table), self.memory.available
        assert self.memory.grow(table) is (room > 0)
        assert len(table) == size + (room > 0)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def goes(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.held))
        self.held.remove(table)
        self.memory.give_back(table)
        self.memory.give_back(table)

    @rule()
    def all_is_forgotten(self) -> None:
        self.memory.forget()
        assert self.memory.kept == 0

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        used = {block for table in self.held for block in table.blocks}
        memory = self.memory
        assert memory.held == len(used)
        assert used.isdisjoint(memory._free)
        assert used.isdisjoint(memory._kept)
        assert memory.free + memory.held + memory.kept == TOTAL
        assert memory.usage == len(used) / TOTAL
        for table in self.held:
            assert len(set(table.blocks)) == len(table)

    @invariant()
    def what_is_shared_is_found_by_one_name(self) -> None:
        assert {block: name for name, block in self.memory._by_name.items()} == self.memory._names


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=50)


@given(st.lists(st.integers(0, 3), max_size=20), st.integers(1, 5))
def test_names_are_of_full_blocks_and_leave_a_token_to_compute(tokens: list[int], size: int) -> None:
    names = chain(tokens, size, 0)
    assert len(names) == max(len(tokens) - 1, 0) // size
    assert chain(tokens[: len(names) * size + 1], size, 0) == names
    assert not names or chain(tokens, size, 1) != names


def test_the_longest_unused_contents_go_first_and_the_end_of_a_prompt_before_its_beginning() -> None:
    memory = KVMemory(4, 1)
    old, new = chain([1, 2, 0], 1, 0), chain([3, 4, 0], 1, 0)
    for names in (old, new):
        table = memory.take(names, 2)
        assert table is not None
        memory.remember(table, names)
        memory.give_back(table)
    assert (memory.free, memory.kept) == (0, 4)
    other = memory.take([], 1)
    assert other is not None
    found = memory.take(old, 2)
    assert found is not None
    assert (found.cached, memory.evictions) == (1, 2)
    assert (memory.queries, memory.hits) == (6, 1)
