"""Where the boxes of a layered graph go: rows from top to bottom, few crossings, straight lines.

A box's row is given; the layout finds the order within rows (barycentre sweeps, then swaps of neighbours) and the
horizontal positions (least squares under minimum distances). Policy on plain data: knows nothing of models, slices
or SVG.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Box:
    """A rectangle in row `row`. `pinned` boxes stand at the right edge of the picture, last in their row."""

    key: str
    width: float
    height: float
    row: int
    pinned: bool = False


@dataclass(frozen=True)
class DrawnPlacement:
    """Centres of boxes, top and height of rows, for each edge the points it passes through, and the width."""

    centre: Mapping[str, tuple[float, float]]
    row_top: Mapping[int, float]
    row_height: Mapping[int, float]
    routes: tuple[tuple[tuple[float, float], ...], ...]
    width: float
    height: float


_GAP_X = 18.0  # least distance of two boxes of a row
_DUMMY_WIDTH = 8.0  # what an edge passing a row takes
_GAP_Y, _STEEPNESS, _GAP_Y_MOST = (
    14.0,
    0.07,
    34.0,
)  # rows stand further apart where edges run sideways between them


def arrange(boxes: Sequence[Box], edges: Sequence[tuple[str, str]], *, sweeps: int = 16) -> DrawnPlacement:
    """Place `boxes`; `edges` go from a higher row to a lower one.

    Raises:
      ValueError: an edge names a box that is not there, or does not lead downwards.
    """
    g = _Layers(boxes, edges)
    g.order(sweeps)
    g.place(sweeps)
    return g.placement()


class _Layers:
    """Rows of nodes: boxes, and a dummy for each row that an edge passes through."""

    def __init__(self, boxes: Sequence[Box], edges: Sequence[tuple[str, str]]) -> None:
        self.boxes = {b.key: b for b in boxes}
        if len(self.boxes) != len(boxes):
            raise ValueError("two boxes have one key")
        self.edges = edges
        self.width = {b.key: b.width for b in boxes}
        rows: dict[int, list[str]] = {}
        for b in boxes:
            rows.setdefault(b.row, []).append(b.key)
        self.up: dict[str, list[str]] = {b.key: [] for b in boxes}
        self.down: dict[str, list[str]] = {b.key: [] for b in boxes}
        self.chains: list[list[str]] = []
        passed: dict[tuple[str, int], str] = {}
        for start, end in edges:
            if start not in self.boxes or end not in self.boxes:
                raise ValueError(f"edge {start} -> {end} names a box that is not there")
            first, last = self.boxes[start].row, self.boxes[end].row
            if first >= last:
                raise ValueError(f"edge {start} -> {end} must lead down: rows {first} -> {last}")
            chain = [start]
            for row in range(first + 1, last):
                # Edges that leave one box share their way down: it is one value.
                dummy = passed.setdefault((start, row), f"{start}|{row}")
                if dummy not in self.width:
                    self.width[dummy] = _DUMMY_WIDTH
                    self.up[dummy], self.down[dummy] = [], []
                    rows.setdefault(row, []).append(dummy)
                chain.append(dummy)
            chain.append(end)
            for upper, lower in pairwise(chain):
                if lower not in self.down[upper]:
                    self.down[upper].append(lower)
                    self.up[lower].append(upper)
            self.chains.append(chain)
        self.numbers = sorted(rows)
        self.rows = {r: rows[r] for r in self.numbers}
        self.x: dict[str, float] = {}

    def _pinned(self, key: str) -> bool:
        return key in self.boxes and self.boxes[key].pinned

    # --- order within rows ---

    def order(self, sweeps: int) -> None:
        """Try orders in sweeps down and up, and keep the one with the fewest crossings."""
        self.at: dict[str, int] = {}
        for r in self.numbers:
            self._set_row(r, sorted(self.rows[r], key=self._pinned))
        best, fewest = dict(self.rows), self._crossings()
        for sweep in range(sweeps):
            downwards = sweep % 2 == 0
            for r in self.numbers if downwards else reversed(self.numbers):
                self._sort_row(r, self.up if downwards else self.down)
            self._swap_neighbours()
            if (crossings := self._crossings()) < fewest:
                best, fewest = dict(self.rows), crossings
            if not fewest:
                break
        for r, keys in best.items():
            self._set_row(r, keys)

    def _set_row(self, r: int, keys: list[str]) -> None:
        self.rows[r] = keys
        self.at.update((k, i) for i, k in enumerate(keys))

    def _sort_row(self, r: int, neighbours: Mapping[str, list[str]]) -> None:
        size = {k: max(1, len(self.rows[q]) - 1) for q in (r - 1, r, r + 1) for k in self.rows.get(q, ())}

        def wish(key: str) -> float:
            near = neighbours[key] or [key]
            return sum(self.at[n] / size[n] for n in near) / len(near)

        self._set_row(r, sorted(self.rows[r], key=lambda k: (self._pinned(k), wish(k))))

    def _swap_neighbours(self) -> None:
        """Swap neighbours in a row while that takes crossings away."""
        for r in self.numbers:
            keys = list(self.rows[r])
            for i in range(len(keys) - 1):
                a, b = keys[i], keys[i + 1]
                if self._pinned(b):
                    continue
                now = sum(_inversions(n[a], n[b], self.at) for n in (self.up, self.down))
                swapped = sum(_inversions(n[b], n[a], self.at) for n in (self.up, self.down))
                if swapped < now:
                    keys[i], keys[i + 1] = b, a
            self._set_row(r, keys)

    def _crossings(self) -> int:
        total = 0
        for r in self.numbers[:-1]:
            seen: list[int] = []
            for key in self.rows[r]:
                ends = sorted(self.at[n] for n in self.down[key])
                total += sum(len(seen) - bisect_left(seen, e + 1) for e in ends)
                for e in ends:
                    insort(seen, e)
        return total

    # --- horizontal positions ---

    def place(self, sweeps: int) -> None:
        self.left_of: dict[str, tuple[str, float]] = {}
        self.right_of: dict[str, tuple[str, float]] = {}
        for keys in self.rows.values():
            left = 0.0
            for k in keys:
                self.x[k] = left + self.width[k] / 2
                left += self.width[k] + _GAP_X
            for a, b in pairwise(keys):
                gap = (self.width[a] + self.width[b]) / 2 + _GAP_X
                self.left_of[b], self.right_of[a] = (a, gap), (b, gap)
        for sweep in range(2 * sweeps):
            downwards = sweep % 2 == 0
            both = sweep >= sweeps
            for r in self.numbers if downwards else reversed(self.numbers):
                self._place_row(r, upper=both or downwards, lower=both or not downwards)
        lines = self._in_left_order(self._lines())
        self._separate(lines)
        for sweep in range(3 * sweeps):
            for line in lines if sweep % 2 else reversed(lines):
                self._move(line)
        free = [k for keys in self.rows.values() for k in keys if not self._pinned(k)]
        left = min(self.x[k] - self.width[k] / 2 for k in free)
        for k in self.x:
            self.x[k] -= left
        beside = [
            self.x[a] + self.width[a] / 2 + _GAP_X + self.width[b]
            for keys in self.rows.values()
            for a, b in pairwise(keys)
            if self._pinned(b)
        ]
        self.total = max([self.x[k] + self.width[k] / 2 for k in free] + beside)
        for k in self.x:
            if self._pinned(k):
                self.x[k] = self.total - self.width[k] / 2

    def _place_row(self, r: int, *, upper: bool, lower: bool) -> None:
        keys = self.rows[r]
        wishes, weights = [], []
        for k in keys:
            near = (self.up[k] if upper else []) + (self.down[k] if lower else [])
            # Long edges are kept straight first; a pinned box only pulls a little.
            pulls = [(self.x[n], self._pull(k, n)) for n in near]
            weight = sum(w for _, w in pulls)
            wishes.append(sum(x * w for x, w in pulls) / weight if pulls else self.x[k])
            weights.append(weight or 0.1)
        gaps = [(self.width[a] + self.width[b]) / 2 + _GAP_X for a, b in pairwise(keys)]
        for k, x in zip(keys, spread(wishes, weights, gaps), strict=True):
            self.x[k] = x

    def _pull(self, a: str, b: str) -> float:
        if self._pinned(a) or self._pinned(b):
            return 0.05
        return 1.0 + 2.0 * (a not in self.boxes) + 2.0 * (b not in self.boxes)

    def _lines(self) -> list[list[str]]:
        """Runs of nodes below each other that should be one vertical line: long edges first, then what they join.

        A node has one partner above and one below at the most, and no two partnerships cross.
        """
        at = self.at
        above: dict[str, str] = {}
        below: dict[str, str] = {}
        for r in self.numbers[:-1]:
            pairs = [
                (a, b)
                for a in self.rows[r]
                for b in self.down[a]
                if not self._pinned(a) and not self._pinned(b)
            ]
            pairs.sort(key=lambda p: -(p[0] not in self.boxes) - (p[1] not in self.boxes))
            taken: list[tuple[int, int]] = []
            for a, b in pairs:
                fits = all((at[a] - i) * (at[b] - j) > 0 for i, j in taken)
                if fits and a not in below and b not in above:
                    below[a], above[b] = b, a
                    taken.append((at[a], at[b]))
        lines = []
        for start in [
            k for keys in self.rows.values() for k in keys if k not in above and not self._pinned(k)
        ]:
            line = [start]
            while line[-1] in below:
                line.append(below[line[-1]])
            lines.append(line)
        return lines

    def _in_left_order(self, lines: list[list[str]]) -> list[list[str]]:
        """Lines so that each comes after those to its left in any row. They do not cross, so there is such an order."""
        number = {k: i for i, line in enumerate(lines) for k in line}
        after: list[set[int]] = [set() for _ in lines]
        waiting = [0] * len(lines)
        for k, (n, _) in self.left_of.items():
            if k in number and number[k] not in after[number[n]]:
                after[number[n]].add(number[k])
                waiting[number[k]] += 1
        order = [i for i, n in enumerate(waiting) if not n]
        for i in order:
            for j in sorted(after[i]):
                waiting[j] -= 1
                if not waiting[j]:
                    order.append(j)
        assert len(order) == len(lines), "two lines cross"
        return [lines[i] for i in order]

    def _separate(self, lines: Sequence[Sequence[str]]) -> None:
        """One position a line. Pushing only to the right, and only to the left, both keep the distances; so does
        the mean of the two."""
        wish = [sum(self.x[k] for k in line) / len(line) for line in lines]
        rightwards: dict[str, float] = {}
        for line, x in zip(lines, wish, strict=True):
            sides = [self.left_of[k] for k in line if k in self.left_of]
            rightwards.update(dict.fromkeys(line, max([x, *(rightwards[n] + gap for n, gap in sides)])))
        leftwards: dict[str, float] = {}
        for line, x in zip(reversed(lines), reversed(wish), strict=True):
            sides = [self.right_of[k] for k in line if k in self.right_of]
            free = [(n, gap) for n, gap in sides if not self._pinned(n)]
            leftwards.update(dict.fromkeys(line, min([x, *(leftwards[n] - gap for n, gap in free)])))
        self.x.update({k: (rightwards[k] + x) / 2 for k, x in leftwards.items()})

    def _move(self, line: Sequence[str]) -> None:
        """Move a line towards what it is joined to, as far as its neighbours leave room."""
        members = set(line)
        near = [(k, n) for k in line for n in (*self.up[k], *self.down[k]) if n not in members]
        if not near:
            return
        pulls = [(self.x[n], self._pull(k, n)) for k, n in near]
        wish = sum(x * w for x, w in pulls) / sum(w for _, w in pulls)
        sides = [self.left_of[k] for k in line if k in self.left_of]
        least = max((self.x[n] + gap for n, gap in sides), default=float("-inf"))
        sides = [self.right_of[k] for k in line if k in self.right_of]
        most = min((self.x[n] - gap for n, gap in sides if not self._pinned(n)), default=float("inf"))
        self.x.update(dict.fromkeys(line, min(max(wish, least), most)))

    # --- result ---

    def placement(self) -> DrawnPlacement:
        height = {
            r: max((self.boxes[k].height for k in keys if k in self.boxes), default=0.0)
            for r, keys in self.rows.items()
        }
        top, y = {}, 0.0
        for r in self.numbers:
            top[r] = y
            sideways = max(
                (abs(self.x[a] - self.x[b]) for a in self.rows[r] for b in self.down[a]), default=0.0
            )
            y += height[r] + min(_GAP_Y_MOST, _GAP_Y + _STEEPNESS * sideways)
        last = self.numbers[-1]
        centre = {k: (self.x[k], top[b.row] + height[b.row] / 2) for k, b in self.boxes.items()}
        routes = []
        for (start, end), chain in zip(self.edges, self.chains, strict=True):
            a, b = self.boxes[start], self.boxes[end]
            points = [(centre[start][0], centre[start][1] + a.height / 2)]
            for row, k in zip(range(a.row + 1, b.row), chain[1:-1], strict=True):
                points += [(self.x[k], top[row]), (self.x[k], top[row] + height[row])]
            points.append((centre[end][0], centre[end][1] - b.height / 2))
            routes.append(tuple(points))
        return DrawnPlacement(centre, top, height, tuple(routes), self.total, top[last] + height[last])


def _inversions(first: Sequence[str], second: Sequence[str], at: Mapping[str, int]) -> int:
    return sum(at[a] > at[b] for a in first for b in second)


def spread(wishes: Sequence[float], weights: Sequence[float], gaps: Sequence[float]) -> list[float]:
    """Positions as near to `wishes` as `gaps` between neighbours allow: weighted least squares, in order.

    Isotonic regression by pooling of adjacent violators, after taking the gaps off.
    """
    offsets = [0.0]
    for gap in gaps:
        offsets.append(offsets[-1] + gap)
    pools: list[tuple[float, float, int]] = []  # mean, weight, members
    for wish, weight, offset in zip(wishes, weights, offsets, strict=True):
        mean, total, count = wish - offset, weight, 1
        while pools and pools[-1][0] > mean:
            m, w, c = pools.pop()
            mean, total, count = (mean * total + m * w) / (total + w), total + w, count + c
        pools.append((mean, total, count))
    means = [mean for mean, _, count in pools for _ in range(count)]
    return [m + o for m, o in zip(means, offsets, strict=True)]
