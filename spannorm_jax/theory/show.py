"""Tables of `theory` as text and as plain JSON."""

from collections.abc import Iterator
from typing import Any

from spannorm_jax.theory import CLAIMS
from spannorm_jax.theory.cells import Tables
from spannorm_jax.theory.verdicts import Estimate

HIDDEN = ('spectrum',)  # too long for a table; in the JSON


def plain(value: Any) -> Any:
    """Estimates as {mean, low, high}."""
    if isinstance(value, Estimate):
        return value.to_json()
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def flat(row: dict[str, Any]) -> dict[str, str]:
    """One line of a table: nested results as `law.field`."""
    cells = {}
    for key, value in row.items():
        if isinstance(value, dict):
            cells |= {f'{key}.{k}': v for k, v in flat(value).items()}
        elif key not in HIDDEN:
            cells[key] = ' '.join(map(str, value)) if isinstance(value, list) else str(value)
    return cells


def tables(found: dict[str, Tables]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """(title, heads, rows of cells) of each table; a row without a column leaves it empty."""
    for claim, parts in found.items():
        for name, rows in parts.items():
            lines = [flat(row) for row in rows]
            heads = list(dict.fromkeys(key for line in lines for key in line))
            yield f'{claim} {name}: {CLAIMS[claim].question}', heads, [[line.get(h, '') for h in heads] for line in lines]


def comparison(found: dict[str, Tables]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """The tables of T1 that stand to be compared with an independent implementation, one per FFN kind: mean of ln(|g_1| / |g_L|)."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in found.get('T1', {}).get('cells', []):
        kinds.setdefault(row['activation'], []).append(row)
    for kind, rows in kinds.items():
        by: dict[tuple[str, str], dict[int, str]] = {}
        for row in rows:
            by.setdefault((row['topology'], row['scale_init']), {})[row['layers']] = f'{row["ln_g1_over_gL"].mean:.5f}'
        heads = ['topology', 'scale_init', *(f'L = {L}' for L in dict.fromkeys(row['layers'] for row in rows))]
        title = f'T1 mean of ln(|g_1| / |g_L|) of the FFN down projection, {kind}'
        yield title, heads, [[*key, *line.values()] for key, line in by.items()]
