"""`spannorm theory`: what SpanNorm's theory predicts against what is measured at initialisation, with intervals and verdicts.

`theory()` runs it; `anatomy` takes a model apart, `t1`, `claims` and `t11` turn measurements into tables, `verdicts` holds the rules.
"""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from spannorm_jax.errors import UserError, nearest
from spannorm_jax.layers import ACTIVATIONS
from spannorm_jax.theory.cells import POSITIONS, ROWS, SHORT, Cell, Tables, measure, sums_and_gradients
from spannorm_jax.theory.claims import jacobian, t5, t6, t8
from spannorm_jax.theory.t1 import t1
from spannorm_jax.theory.t11 import norms_of_blocks, t11

DEPTHS, SEEDS, ACTIVATION_AXIS = (8, 32, 128, 512), 5, ('swiglu', 'gelu', 'relu')
SCALES = ('none', 'sqrt_2L')


class Claim(NamedTuple):
    """A claim: its question, the cells it needs, what is measured in each, on tokens of which shape, and the tables made of it."""

    question: str
    cells: Callable[[int, Sequence[str]], list[Cell]]  # of a depth and the FFN kinds
    of: Callable[..., Any]
    shape: tuple[int, int]
    tables: Callable[[dict[Cell, Any]], Tables]


def _grid(*topologies: str, all_kinds: bool = False) -> Callable[[int, Sequence[str]], list[Cell]]:
    return lambda L, kinds: [Cell(t, s, L, a) for a in (kinds if all_kinds else kinds[:1]) for s in SCALES for t in topologies]


def _first_blocks(L: int, kinds: Sequence[str]) -> list[Cell]:
    return [Cell('span', 'sqrt_2L', L, kinds[0], skip, std) for skip in ('raw', 'normed') for std in (1.0, 0.02)]


CLAIMS = {
    'T1': Claim('is the gradient of Span the square root of that of Post?', _grid('pre', 'post', 'span', all_kinds=True),
                sums_and_gradients, (ROWS, POSITIONS), t1),
    'T5': Claim('is there an identity-like path from end to end?', _grid('pre', 'post', 'span'), jacobian, (1, SHORT), t5),
    'T6': Claim('is Var(F) = O(1/L), and are branch and skip uncorrelated?', _grid('pre', 'post', 'span', all_kinds=True),
                sums_and_gradients, (ROWS, POSITIONS), t6),
    'T8': Claim('first block: reading A or B, and which embedding std?', _first_blocks, sums_and_gradients, (ROWS, POSITIONS), t8),
    'T11': Claim("do the paper's other assumptions hold?", _grid('post', 'span'), norms_of_blocks, (1, SHORT), t11),
}  # fmt: skip


def theory(
    only: Sequence[str] = (),
    depths: Sequence[int] = DEPTHS,
    seeds: int = SEEDS,
    activations: Sequence[str] = ACTIVATION_AXIS,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Tables]:
    """Tables by claim; `only` some of CLAIMS (all by default). FFN kinds are an axis of T1 and T6; the first one serves the others.

    Seeds 0 .. seeds - 1; every interval is over them, 95%. Raises UserError for an unknown claim or FFN kind, a depth below 2, one seed.
    """
    wanted = [name.upper() for name in only] or list(CLAIMS)
    for name, known in [*((n, CLAIMS) for n in wanted), *((a, ACTIVATIONS) for a in activations)]:
        if name not in known:
            raise UserError(f'theory: unknown {name!r}; {nearest(name, known)}')
    if not depths or not activations:
        raise UserError(f'theory: --{"activations" if depths else "depths"} names none; name one, or leave the option out')
    if bad := [L for L in depths if L < 2]:
        raise UserError(f'theory: --depths {bad[0]}: a gradient over depth needs at least 2 blocks')
    if seeds < 2:
        raise UserError(f'theory: --seeds {seeds}: an interval needs at least 2 seeds')
    kinds, began = tuple(dict.fromkeys(activations)), time.monotonic()
    asked = {name: [cell for L in sorted(set(depths)) for cell in CLAIMS[name].cells(L, kinds)] for name in wanted}
    work: dict[Cell, dict[Callable[..., Any], tuple[int, int]]] = {}  # T1, T6 and T8 share measurements
    for name, cells in asked.items():
        for cell in cells:
            work.setdefault(cell, {})[CLAIMS[name].of] = CLAIMS[name].shape

    def one(cell: Cell):
        seen = measure(cell, seeds, work[cell])
        tell(f'{time.monotonic() - began:7.1f} s  ' + '  '.join(map(str, cell.to_json().values())))
        return seen

    # A model of this width fills no more than one core, so cells run side by side: the deepest first, that none is left over at the end.
    order = sorted(work, key=lambda cell: -cell.layers)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        seen = dict(zip(order, pool.map(one, order), strict=True))
    return {name: CLAIMS[name].tables({cell: seen[cell][CLAIMS[name].of] for cell in cells}) for name, cells in asked.items()}
