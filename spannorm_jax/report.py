"""A plan as lines to read."""

from collections.abc import Iterator

from spannorm_jax.plan import Plan


def lines(p: Plan) -> Iterator[str]:
    mesh = ' x '.join(f'{axis} {n}' for axis, n in p.mesh.items() if n != 1) or 'one chip'
    yield f'{p.name} on {p.chips}: {mesh}; remat {p.remat}; {p.tokens_per_step:,} tokens per step'
    yield f'  parameters: {p.params:,}'
    yield f'  FLOPs per token: {p.flops_per_token:.4g} by formula, {p.traced_flops_per_token:.4g} traced, with what is recomputed'
    if p.compiler_flops:
        share = p.compiler_flops / p.traced_flops_once
        yield f'  FLOPs per chip, loops taken once: {p.traced_flops_once:.4g} traced, {p.compiler_flops:.4g} by the compiler ({share:.3f})'
    b, room = p.bytes, p.hbm_bytes / 1e9
    peak = 'unknown' if b.peak is None else f'{b.peak / 1e9:.3f}'
    temporaries = 'unknown' if b.temporaries is None else f'{b.temporaries / 1e9:.3f}'
    yield f'  GB per chip: arguments {b.arguments / 1e9:.3f}, temporaries {temporaries}, peak {peak} of {room:.2f}: ' + (
        'fits' if p.fits else 'DOES NOT FIT'
    )
    for t in p.collectives:
        crossing = f', {t.crossing / 1e9:.3f} GB of it to other slices or hosts' if t.crossing else ''
        if t.bytes > 1e6:
            yield f'  {t.kind} over {t.axes}: {t.runs} a step, {t.bytes / 1e9:.3f} GB sent per chip{crossing}'
    parts = ', '.join(f'{what} {1000 * s:.1f}' for what, s in p.floor_of.items() if s)
    yield f'  step takes at least {1000 * p.floor_s:.1f} ms = {p.floor_formula} (ms: {parts})'
    compiled = '' if p.compiled_kernel == p.attention_kernel else f' (compiled here with {p.compiled_kernel})'
    yield f'  attention kernel: {p.attention_kernel}{compiled}; compiled in {p.compile_s:.1f} s'
    yield from (f'  sharding: {note}' for note in p.notes)
