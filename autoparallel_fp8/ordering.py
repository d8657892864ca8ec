"""Instructions put in the order in which they run; see `schedule.py` for what is aimed at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .expansion import Space
from .items import Begin, End, Item, is_collective
from .program import Instruction, Key, RunOp, RunStep, makes_of, reads_of
from .structure import Structure


class Scheduler:
    """Puts instructions of one half in order."""

    def __init__(self, space: Space, shape: Structure) -> None:
        self.space, self.shape = space, shape
        self.numbers = 0

    def items(self, instructions: Sequence[Instruction]) -> tuple[Item, ...]:
        return tuple(_Order(self, instructions).written())

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def is_of_weights(self, instruction: Instruction) -> bool:
        """Whether only parameters lead here."""
        nodes = self.space.graph.nodes
        if isinstance(instruction, RunOp):
            return nodes[instruction.node].from_parameters
        return nodes[instruction.ref.node].from_parameters or nodes[instruction.ref.node].kind == "parameter"

    def is_of_gradient(self, instruction: Instruction) -> bool:
        """Whether only gradients follow."""
        return isinstance(instruction, RunStep) and self.shape.links[instruction.link].is_hideable

    def layer(self, instruction: Instruction) -> str:
        nodes = self.space.graph.nodes
        if isinstance(instruction, RunOp):
            return nodes[instruction.node].layer
        target = self.shape.variables[self.shape.links[instruction.link].target]
        reader = nodes[target.node]
        return (reader if reader.kind == "op" else nodes[instruction.ref.node]).layer

    def group(self, move: RunStep) -> tuple[object, ...]:
        """What collectives that go as one call have in common."""
        step, dtype = move.step, self.space.graph.spec(move.ref).dtype
        alone = move.target if step.kind == "all_to_all" else None
        return (step.kind, step.axes, step.reduction, str(dtype), alone)


class _Order:
    """One list of instructions being put in order.

    Attributes:
        out: items so far.
        there: values that are there, or that nobody here makes.
        begun: collectives that were started and not waited for: value -> its group.
        late: instructions that wait for a reduction of a gradient, in order.
        held: values that come of these.
    """

    def __init__(self, owner: Scheduler, instructions: Sequence[Instruction]) -> None:
        self.owner = owner
        self.made_by = {key: i for i in instructions for key in makes_of(i)}
        self.out: list[Item] = []
        self.there: set[Key] = set()
        self.begun: dict[Key, Begin] = {}
        self.late: list[Instruction] = []
        self.held: set[Key] = set()
        self.main = [i for i in instructions if not owner.is_of_weights(i)]
        self.segments = self._segments()
        self.stages = self._stages()

    def written(self) -> list[Item]:
        for stage in self.stages[0] if self.stages else []:
            self._prefetch(stage)
        reductions: list[Begin] = []
        for number, segment in enumerate(self.segments):
            ahead = self.stages[number + 1] if number + 1 < len(self.stages) else []
            for position, instruction in enumerate(segment):
                for j, stage in enumerate(ahead):
                    if position == j * len(segment) // len(ahead):
                        self._prefetch(stage)
                self._run(instruction)
            reductions = self._reduce(reductions)
        while reductions or self.late:
            reductions = self._reduce(reductions)
        for instruction in self.made_by.values():  # of weights, wanted as it is: a result, or kept for backward
            self._need(makes_of(instruction))
        return self.out

    # ---- segments and what is fetched for them ----

    def _segments(self) -> list[list[Instruction]]:
        """The main instructions, cut where the layer changes; what belongs to no layer goes with what is around it."""
        phase = self.main[-1].phase if self.main else ""
        layers = [self.owner.layer(i) if i.phase == phase else "" for i in self.main]  # what is made again has none
        named = [k for k, layer in enumerate(layers) if layer]
        found: list[list[Instruction]] = []
        current: str | None = None
        for k, (instruction, layer) in enumerate(zip(self.main, layers, strict=True)):
            if not layer and named and named[0] < k < named[-1]:
                layer = current or ""
            if layer != current:
                found.append([])
                current = layer
            found[-1].append(instruction)
        return found

    def _stages(self) -> list[list[list[Instruction]]]:
        """For each segment, what must run for its weights before its own part: a list a stage, collectives last."""
        level: dict[Key, int] = {}
        seen: set[Instruction] = set()
        leads: dict[Instruction, bool] = {}
        chains = [self._chain(segment, seen) for segment in self.segments]
        readers: dict[Key, list[Instruction]] = {}
        for instruction in (i for chain in chains for i in chain):
            for key in reads_of(instruction):
                readers.setdefault(key, []).append(instruction)
        for instruction in (i for chain in reversed(chains) for i in reversed(chain)):
            follows = [r for key in makes_of(instruction) for r in readers.get(key, [])]
            leads[instruction] = is_collective(instruction) or any(leads[r] for r in follows)
        found = []
        for chain in chains:
            stages: list[list[Instruction]] = []
            for instruction in chain:
                at = max((level.get(key, 0) for key in reads_of(instruction)), default=0)
                level.update(dict.fromkeys(makes_of(instruction), at + is_collective(instruction)))
                if leads[instruction]:
                    stages += [[] for _ in range(at + 1 - len(stages))]
                    stages[at].append(instruction)
            found.append(stages)
        return found

    def _chain(self, segment: Sequence[Instruction], seen: set[Instruction]) -> list[Instruction]:
        """What derives from parameters alone and is first needed in this segment, in order."""
        found: list[Instruction] = []

        def collect(key: Key) -> None:
            instruction = self.made_by.get(key)
            if instruction is None or instruction in seen or not self.owner.is_of_weights(instruction):
                return
            seen.add(instruction)
            for read in reads_of(instruction):
                collect(read)
            found.append(instruction)

        for instruction in segment:
            for key in reads_of(instruction):
                collect(key)
        return found

    def _prefetch(self, stage: Sequence[Instruction]) -> None:
        """Everything of a stage, its collectives started together at the end."""
        collectives = [i for i in stage if is_collective(i)]
        for instruction in collectives:
            self._need(reads_of(instruction))
        self._begin(collectives)

    # ---- the main part ----

    def _run(self, instruction: Instruction) -> None:
        """The instruction in its place, or kept for later where it waits for a gradient's reduction."""
        if self.there.issuperset(makes_of(instruction)):
            return  # a constant that weights wanted earlier
        if not self.held.isdisjoint(reads_of(instruction)) or (
            is_collective(instruction) and self.owner.is_of_gradient(instruction)
        ):
            self.late.append(instruction)
            self.held.update(makes_of(instruction))
            return
        self._emit(instruction)

    def _emit(self, instruction: Instruction) -> None:
        self._need(reads_of(instruction))
        if is_collective(instruction):
            self._begin([instruction])
            self._end(self.begun[makes_of(instruction)[0]])
        else:
            self.out.append(instruction)
            self.there.update(makes_of(instruction))

    def _need(self, keys: Iterable[Key]) -> None:
        """Waits for, or runs, whatever these values still need."""
        for key in keys:
            if key in self.there or key not in self.made_by:
                continue
            if key in self.begun:
                self._end(self.begun[key])
            else:  # of weights, or a constant that they read
                assert key not in self.held, f"{key} is read before it is reduced"
                self._emit(self.made_by[key])

    def _begin(self, steps: Sequence[Instruction]) -> list[Begin]:
        """Starts collectives, those alike as one call."""
        groups: dict[tuple[object, ...], list[RunStep]] = {}
        for move in steps:
            assert isinstance(move, RunStep)
            if move.target not in self.there and move.target not in self.begun:
                groups.setdefault(self.owner.group(move), []).append(move)
        begun = []
        for moves in groups.values():
            begin = Begin(self.owner.number(), tuple(moves))
            self.out.append(begin)
            self.begun.update({move.target: begin for move in moves})
            begun.append(begin)
        return begun

    def _end(self, begin: Begin) -> None:
        self.out.append(End(begin.number, begin.moves))
        for move in begin.moves:
            del self.begun[move.target]
            self.there.add(move.target)

    def _reduce(self, started: Sequence[Begin]) -> list[Begin]:
        """At the end of a segment: waits for the reductions of the one before, and starts this one's."""
        for begin in started:
            self.held.difference_update(move.target for move in begin.moves)
            self._end(begin)
        ready: list[Instruction] = []
        left: list[Instruction] = []
        for instruction in self.late:
            if not self.held.isdisjoint(reads_of(instruction)):
                left.append(instruction)
            elif is_collective(instruction):
                ready.append(instruction)
            else:
                self.held.difference_update(makes_of(instruction))
                self._emit(instruction)
        self.late = left
        for instruction in ready:
            self._need(reads_of(instruction))
        return self._begin(ready)
