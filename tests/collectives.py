"""Collectives of an optimized program: their dtypes, shapes, and numbers of runs.

    all-gather bf16[1024,4096] x4        8.4 MB a time; its loop runs four times

They are read from the text after XLA has partitioned, combined and scheduled the
program, so devices run exactly these. A collective of several arrays is one
`Collective` of several parts.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

OPERATIONS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# Collectives that bring whole arrays to a device, or move them to another.
GATHERS = ("all-gather", "all-to-all", "collective-permute")
# Bits of a value; of dtypes that no collective here has, reading one raises.
BITS = {"pred": 8, "bf16": 16}
_PART = re.compile(r"([a-z]+\d*\w*)\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (.*)$")
_OPERATION = re.compile(rf" ({'|'.join(OPERATIONS)})(-start)?\(")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


@dataclass(frozen=True)
class Part:
    """One array of a collective.

    Attributes:
      dtype: its dtype as HLO writes it.
      shape: the shape that a device holds of it.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Values of the array."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the array."""
        bits = BITS.get(self.dtype) or int(re.findall(r"\d+", self.dtype)[0])
        return self.size * bits // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
      operation: one of `OPERATIONS`.
      parts: its results on a device: whole arrays of an all-gather, a device's own of a
        reduce-scatter.
      times: how often a step runs it.
      group: how many devices take part, or 0 where that is not written as a number.
      source: the name of the operation in the program as it was traced.
    """

    operation: str
    parts: tuple[Part, ...]
    times: int
    group: int
    source: str

    @property
    def bytes(self) -> int:
        """Bytes of all results in a step: whole arrays after a gather, else parts."""
        return self.times * sum(part.bytes for part in self.parts)

    def __str__(self) -> str:
        parts = ", ".join(map(str, self.parts))
        return f"{self.operation} {parts} x{self.times} of {self.group}: {self.source}"


def collectives(text: str) -> list[Collective]:
    """Return the collectives of an optimized program, in the order of the text.

    Raises:
      ValueError: a loop with a collective whose number of rounds XLA did not find, or a
        program without an entry.

    >>> [str(c) for c in collectives('''
    ... ENTRY %main (p: bf16[2,4]) -> bf16[8,4] {
    ...   %p = bf16[2,4]{1,0} parameter(0)
    ...   ROOT %g = bf16[8,4]{1,0} all-gather(%p), replica_groups=[1,4]<=[4]
    ... }''')]
    ['all-gather bf16[8,4] x1 of 4: ']
    """
    bodies, entry = _computations(text)
    times = _times(bodies, entry)
    found = []
    for name, lines in bodies.items():
        for line in lines:
            one = _collective(line, times.get(name, 0))
            if one is not None:
                found.append(one)
    return found


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """(the instructions of each computation, the name of the entry)."""
    bodies: dict[str, list[str]] = {}
    entry = ""
    name = ""
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line)
        if head:
            name = head[2]
            bodies[name] = []
            entry = name if head[1] else entry
        elif name and _INSTRUCTION.match(line):
            bodies[name].append(line)
    if not entry:
        raise ValueError(
            "the text has no ENTRY computation; pass compiled.as_text() of an optimized"
            " program"
        )
    return bodies, entry


def _times(bodies: dict[str, list[str]], entry: str) -> dict[str, int]:
    """How often a run of the program runs each computation.

    It is 0 for loops of unknown length, which hold no collective.
    """
    times: dict[str, int] = {}

    def visit(name: str, count: int) -> None:
        times[name] = times.get(name, 0) + count
        for line in bodies[name]:
            for called, rounds in _calls(line):
                if rounds is None and _holds_collective(bodies, called):
                    raise ValueError(
                        f"the loop {called} has collectives, and XLA knows no number of"
                        " rounds for it"
                    )
                visit(called, count * (rounds or 0))

    visit(entry, 1)
    return times


def _calls(line: str) -> Iterator[tuple[str, int | None]]:
    """(computation, how often the instruction runs it) of all that it calls."""
    # The function that an all-reduce applies only adds two numbers.
    if _OPERATION.search(line):
        return
    called = _CALLED.findall(line)
    for branches in _BRANCHES.findall(line):
        called += [branch.strip(" %") for branch in branches.split(",")]
    rounds: int | None = 1
    if " while(" in line:
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
        rounds = int(known[1]) if known else None
    for name in called:
        yield name, rounds


def _holds_collective(bodies: dict[str, list[str]], name: str) -> bool:
    for line in bodies[name]:
        if _OPERATION.search(line):
            return True
        if any(_holds_collective(bodies, called) for called, _ in _calls(line)):
            return True
    return False


def _collective(line: str, times: int) -> Collective | None:
    """The collective of an instruction that runs so often, or None."""
    found = _OPERATION.search(line)
    if found is None or not times:
        return None
    results = line[line.index(" = ") + 3 : found.start()]
    if found[2] and results.startswith("(("):
        results = _second(results)  # of ((operands), results)
    elif found[2] and found[1] != "all-reduce":
        results = results.strip("()").split(", ", 1)[1]
    parts = [Part(dtype, _sizes(shape)) for dtype, shape in _PART.findall(results)]
    source = re.search(r'op_name="([^"]*)"', line)
    name = source[1] if source else ""
    return Collective(found[1], tuple(parts), times, _group(line), name)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(",") if size)


def _second(results: str) -> str:
    depth = 0
    for place, character in enumerate(results):
        depth += (character == "(") - (character == ")")
        if depth == 1 and character == ")":
            return results[place + 1 :]
    return results


def _group(line: str) -> int:
    """Devices of one group, of the forms in which HLO writes them."""
    counted = re.search(r"replica_groups=\[\d+,(\d+)\]", line)
    if counted:
        return int(counted[1])
    named = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line)
    if named:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        axes = re.findall(r"'(\w+)'", named[2])
        return math.prod(int(sizes.get(axis, 1)) for axis in axes)
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", line)
    return len(listed[1].split(",")) if listed else 0
